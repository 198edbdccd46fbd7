// What a physical device is and can do: read once, used to describe it, to open it and to check what it is asked.
#pragma once

#include <string>
#include <vector>

#include "instance.h"

namespace qv {

constexpr uint32_t kBindings = 12;  // storage buffers of a shader, at most
constexpr uint32_t kFewestBindings = 8;

struct Physical {
  Physical(Instance& instance, VkPhysicalDevice handle);
  Physical(const Physical&) = delete;  // the structures below point at each other
  Physical& operator=(const Physical&) = delete;

  bool has(const char* extension) const;
  bool at_least(uint32_t version) const { return properties.properties.apiVersion >= version; }
  const VkPhysicalDeviceLimits& limits() const { return properties.properties.limits; }
  // Family of the first queue that computes, or -1.
  int32_t queue_family() const;
  uint32_t timestamp_bits() const;
  // Storage buffers that a shader can have here.
  uint32_t bindings() const;
  // Why this library cannot use the device; empty if it can.
  std::string missing() const;

  Instance& instance;
  const VkPhysicalDevice handle;
  std::vector<VkExtensionProperties> extensions;
  std::vector<VkQueueFamilyProperties> queues;
  VkPhysicalDeviceMemoryProperties memory{};

  VkPhysicalDeviceProperties2 properties{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2};
  VkPhysicalDeviceVulkan11Properties properties11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES};
  VkPhysicalDeviceVulkan12Properties properties12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES};
  VkPhysicalDeviceVulkan13Properties properties13{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_PROPERTIES};
  VkPhysicalDeviceShaderSMBuiltinsPropertiesNV cores_nv{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SM_BUILTINS_PROPERTIES_NV};

  VkPhysicalDeviceFeatures2 features{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
  VkPhysicalDeviceVulkan11Features features11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  VkPhysicalDeviceVulkan12Features features12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  VkPhysicalDeviceVulkan13Features features13{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES};
  VkPhysicalDeviceCooperativeMatrixFeaturesKHR cooperative{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR};
  VkPhysicalDeviceShaderBfloat16FeaturesKHR bfloat16{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR};
  std::vector<VkCooperativeMatrixPropertiesKHR> matrices;

 private:
  void read_lists();
  void read_properties();
  void read_features();
  void read_matrices();
};

// The text of qv_devices.
std::string describe_devices(Instance& instance);

}  // namespace qv
