// Tables of Vulkan functions: none is linked, all come from the loader that is opened at first use.
#pragma once

#include "extensions.h"

#define QV_GLOBAL_FUNCTIONS(X)        \
  X(vkCreateInstance)                 \
  X(vkEnumerateInstanceLayerProperties) \
  X(vkEnumerateInstanceVersion)

#define QV_INSTANCE_FUNCTIONS(X)           \
  X(vkCreateDevice)                        \
  X(vkEnumerateDeviceExtensionProperties)  \
  X(vkEnumeratePhysicalDevices)            \
  X(vkGetDeviceProcAddr)                   \
  X(vkGetPhysicalDeviceFeatures2)          \
  X(vkGetPhysicalDeviceMemoryProperties)   \
  X(vkGetPhysicalDeviceProperties)         \
  X(vkGetPhysicalDeviceProperties2)        \
  X(vkGetPhysicalDeviceQueueFamilyProperties)

#define QV_DEVICE_FUNCTIONS(X)    \
  X(vkAllocateCommandBuffers)     \
  X(vkAllocateMemory)             \
  X(vkBeginCommandBuffer)         \
  X(vkBindBufferMemory)           \
  X(vkCmdBindPipeline)            \
  X(vkCmdCopyBuffer)              \
  X(vkCmdDispatch)                \
  X(vkCmdFillBuffer)              \
  X(vkCmdPipelineBarrier)         \
  X(vkCmdPushConstants)           \
  X(vkCmdPushDescriptorSetKHR)    \
  X(vkCmdResetQueryPool)          \
  X(vkCmdWriteTimestamp)          \
  X(vkCreateBuffer)               \
  X(vkCreateCommandPool)          \
  X(vkCreateComputePipelines)     \
  X(vkCreateDescriptorSetLayout)  \
  X(vkCreatePipelineCache)        \
  X(vkCreatePipelineLayout)       \
  X(vkCreateQueryPool)            \
  X(vkCreateSemaphore)            \
  X(vkCreateShaderModule)         \
  X(vkDestroyBuffer)              \
  X(vkDestroyCommandPool)         \
  X(vkDestroyDescriptorSetLayout) \
  X(vkDestroyDevice)              \
  X(vkDestroyPipeline)            \
  X(vkDestroyPipelineCache)       \
  X(vkDestroyPipelineLayout)      \
  X(vkDestroyQueryPool)           \
  X(vkDestroySemaphore)           \
  X(vkDestroyShaderModule)        \
  X(vkDeviceWaitIdle)             \
  X(vkEndCommandBuffer)           \
  X(vkFreeCommandBuffers)         \
  X(vkFreeMemory)                 \
  X(vkGetBufferMemoryRequirements) \
  X(vkGetDeviceQueue)             \
  X(vkGetPipelineCacheData)       \
  X(vkGetQueryPoolResults)        \
  X(vkGetSemaphoreCounterValue)   \
  X(vkMapMemory)                  \
  X(vkQueueSubmit)                \
  X(vkResetCommandBuffer)         \
  X(vkWaitSemaphores)

namespace qv {

#define QV_MEMBER(name) PFN_##name name = nullptr;

struct GlobalFunctions {
  PFN_vkGetInstanceProcAddr vkGetInstanceProcAddr = nullptr;
  QV_GLOBAL_FUNCTIONS(QV_MEMBER)
};

struct InstanceFunctions {
  QV_INSTANCE_FUNCTIONS(QV_MEMBER)
  // Of extensions: null if the instance has none.
  PFN_vkCreateDebugUtilsMessengerEXT vkCreateDebugUtilsMessengerEXT = nullptr;
  PFN_vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR = nullptr;
};

struct DeviceFunctions {
  QV_DEVICE_FUNCTIONS(QV_MEMBER)
};

#undef QV_MEMBER

}  // namespace qv
