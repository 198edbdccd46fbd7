#include "physical.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace qv {
namespace {

// Adds a structure to a chain that ends at `tail`.
template <class T>
void link(void**& tail, T& next) {
  *tail = &next;
  tail = &next.pNext;
}

}  // namespace

Physical::Physical(Instance& instance, VkPhysicalDevice handle) : instance(instance), handle(handle) {
  instance.vk.vkGetPhysicalDeviceProperties(handle, &properties.properties);
  read_lists();
  if (!at_least(VK_API_VERSION_1_2)) return;  // described, never opened
  read_properties();
  read_features();
  read_matrices();
}

void Physical::read_lists() {
  const auto& vk = instance.vk;
  constexpr char kEnumerate[] = "vkEnumerateDeviceExtensionProperties";
  uint32_t count = 0;
  check(vk.vkEnumerateDeviceExtensionProperties(handle, nullptr, &count, nullptr), kEnumerate);
  extensions.resize(count);
  check(vk.vkEnumerateDeviceExtensionProperties(handle, nullptr, &count, extensions.data()), kEnumerate);
  extensions.resize(count);
  vk.vkGetPhysicalDeviceQueueFamilyProperties(handle, &count, nullptr);
  queues.resize(count);
  vk.vkGetPhysicalDeviceQueueFamilyProperties(handle, &count, queues.data());
  vk.vkGetPhysicalDeviceMemoryProperties(handle, &memory);
}

void Physical::read_properties() {
  void** tail = &properties.pNext;
  link(tail, properties11);
  link(tail, properties12);
  if (at_least(VK_API_VERSION_1_3)) link(tail, properties13);
  if (has(VK_NV_SHADER_SM_BUILTINS_EXTENSION_NAME)) link(tail, cores_nv);
  instance.vk.vkGetPhysicalDeviceProperties2(handle, &properties);
}

void Physical::read_features() {
  void** tail = &features.pNext;
  link(tail, features11);
  link(tail, features12);
  if (at_least(VK_API_VERSION_1_3)) link(tail, features13);
  if (has(VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME)) link(tail, cooperative);
  if (has(VK_KHR_SHADER_BFLOAT16_EXTENSION_NAME)) link(tail, bfloat16);
  instance.vk.vkGetPhysicalDeviceFeatures2(handle, &features);
}

void Physical::read_matrices() {
  auto read = instance.vk.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR;
  if (!cooperative.cooperativeMatrix || !read) return;
  uint32_t count = 0;
  check(read(handle, &count, nullptr), "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR");
  VkCooperativeMatrixPropertiesKHR empty{VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR};
  matrices.assign(count, empty);
  check(read(handle, &count, matrices.data()), "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR");
  matrices.resize(count);
}

bool Physical::has(const char* extension) const {
  for (const VkExtensionProperties& known : extensions) {
    if (!std::strcmp(known.extensionName, extension)) return true;
  }
  return false;
}

int32_t Physical::queue_family() const {
  for (size_t family = 0; family < queues.size(); ++family) {
    if (queues[family].queueFlags & VK_QUEUE_COMPUTE_BIT) return static_cast<int32_t>(family);
  }
  return -1;
}

uint32_t Physical::timestamp_bits() const {
  int32_t family = queue_family();
  return family < 0 ? 0 : queues[family].timestampValidBits;
}

uint32_t Physical::bindings() const {
  const VkPhysicalDeviceLimits& most = limits();
  return std::min({most.maxPerStageDescriptorStorageBuffers, most.maxDescriptorSetStorageBuffers, kBindings});
}

std::string Physical::missing() const {
  if (!at_least(VK_API_VERSION_1_2)) return "its driver is older than Vulkan 1.2";
  if (queue_family() < 0) return "it has no queue that computes";
  if (!features12.timelineSemaphore) return "it has no timeline semaphores";
  if (!has(VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME)) return "it has no VK_KHR_push_descriptor";
  if (!features11.storageBuffer16BitAccess) return "its storage buffers have no 16-bit elements";
  if (bindings() < kFewestBindings) return "its shaders see " + std::to_string(bindings()) + " storage buffers, of 8";
  return "";
}

}  // namespace qv
