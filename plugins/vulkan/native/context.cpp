#include "context.h"

#include "error.h"
#include "qcore_vulkan.h"

namespace qv {
namespace {

// The features that shaders of this package may use, each only if the device has it. Enabling everything a device
// reports would switch on checks (robust access) that cost time.
struct Enabled {
  explicit Enabled(const Physical& device);

  VkPhysicalDeviceFeatures2 features{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
  VkPhysicalDeviceVulkan11Features features11{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES};
  VkPhysicalDeviceVulkan12Features features12{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES};
  VkPhysicalDeviceVulkan13Features features13{VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES};
  VkPhysicalDeviceCooperativeMatrixFeaturesKHR cooperative{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR};
  VkPhysicalDeviceShaderBfloat16FeaturesKHR bfloat16{
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR};
  std::vector<const char*> extensions{VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME};

 private:
  void core(const Physical& device);
  void of_extensions(const Physical& device);
};

void Enabled::core(const Physical& device) {
  features.features.shaderInt16 = device.features.features.shaderInt16;
  features.features.shaderInt64 = device.features.features.shaderInt64;
  features11.storageBuffer16BitAccess = device.features11.storageBuffer16BitAccess;
  features12.storageBuffer8BitAccess = device.features12.storageBuffer8BitAccess;
  features12.shaderInt8 = device.features12.shaderInt8;
  features12.shaderFloat16 = device.features12.shaderFloat16;
  features12.shaderSubgroupExtendedTypes = device.features12.shaderSubgroupExtendedTypes;
  features12.timelineSemaphore = VK_TRUE;
  features12.vulkanMemoryModel = device.features12.vulkanMemoryModel;
  features12.vulkanMemoryModelDeviceScope = device.features12.vulkanMemoryModelDeviceScope;
  features13.shaderIntegerDotProduct = device.features13.shaderIntegerDotProduct;
  features13.subgroupSizeControl = device.features13.subgroupSizeControl;
  features13.computeFullSubgroups = device.features13.computeFullSubgroups;
  features13.maintenance4 = device.features13.maintenance4;
}

void Enabled::of_extensions(const Physical& device) {
  void** tail = device.at_least(VK_API_VERSION_1_3) ? &features13.pNext : &features12.pNext;
  if (device.cooperative.cooperativeMatrix && device.features12.vulkanMemoryModel) {
    cooperative.cooperativeMatrix = VK_TRUE;
    extensions.push_back(VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME);
    *tail = &cooperative;
    tail = &cooperative.pNext;
  }
  if (device.bfloat16.shaderBFloat16Type) {
    bfloat16.shaderBFloat16Type = VK_TRUE;
    bfloat16.shaderBFloat16DotProduct = device.bfloat16.shaderBFloat16DotProduct;
    bfloat16.shaderBFloat16CooperativeMatrix = device.bfloat16.shaderBFloat16CooperativeMatrix;
    extensions.push_back(VK_KHR_SHADER_BFLOAT16_EXTENSION_NAME);
    *tail = &bfloat16;
  }
}

Enabled::Enabled(const Physical& device) {
  features.pNext = &features11;
  features11.pNext = &features12;
  if (device.at_least(VK_API_VERSION_1_3)) features12.pNext = &features13;
  core(device);
  of_extensions(device);
}

}  // namespace

Context::Context(Instance& instance, VkPhysicalDevice handle)
    : physical(std::make_unique<Physical>(instance, handle)) {
  std::string missing = physical->missing();
  if (!missing.empty()) {
    throw Error(QV_UNSUPPORTED, std::string(physical->properties.properties.deviceName) + " cannot serve: " + missing);
  }
  family = static_cast<uint32_t>(physical->queue_family());
  create();
  load();
  vk.vkGetDeviceQueue(device, family, 0, &queue);
}

Context::~Context() {
  if (device && vk.vkDestroyDevice) vk.vkDestroyDevice(device, nullptr);
}

void Context::create() {
  const Enabled enabled(*physical);
  const float priority = 1.0f;
  VkDeviceQueueCreateInfo queues{VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO};
  queues.queueFamilyIndex = family;
  queues.queueCount = 1;
  queues.pQueuePriorities = &priority;
  VkDeviceCreateInfo info{VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO};
  info.pNext = &enabled.features;
  info.queueCreateInfoCount = 1;
  info.pQueueCreateInfos = &queues;
  info.enabledExtensionCount = static_cast<uint32_t>(enabled.extensions.size());
  info.ppEnabledExtensionNames = enabled.extensions.data();
  check(physical->instance.vk.vkCreateDevice(physical->handle, &info, nullptr, &device), "vkCreateDevice");
}

void Context::load() {
  auto find = physical->instance.vk.vkGetDeviceProcAddr;
  vk.vkDestroyDevice = reinterpret_cast<PFN_vkDestroyDevice>(find(device, "vkDestroyDevice"));
  try {
#define QV_LOAD(name)                                              \
  vk.name = reinterpret_cast<PFN_##name>(find(device, #name)); \
  if (!vk.name) throw Error(QV_UNSUPPORTED, "the driver has no " #name);
    QV_DEVICE_FUNCTIONS(QV_LOAD)
#undef QV_LOAD
  } catch (...) {
    if (vk.vkDestroyDevice) vk.vkDestroyDevice(device, nullptr);  // the destructor does not run
    throw;
  }
}

void Context::allocating() {
  if (!fail_next_allocation) return;
  fail_next_allocation = false;
  throw Error(QV_OUT_OF_MEMORY, "out of device memory: injected by a test");
}

bool Context::can_require_subgroup(uint32_t size) const {
  const auto& control = physical->properties13;
  return physical->features13.subgroupSizeControl &&
         control.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT && size >= control.minSubgroupSize &&
         size <= control.maxSubgroupSize && (size & (size - 1)) == 0;
}

}  // namespace qv
