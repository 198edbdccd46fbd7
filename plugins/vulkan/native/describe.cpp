// The physical devices as JSON.
#include "error.h"
#include "json.h"
#include "memory.h"
#include "physical.h"
#include "qcore_vulkan.h"

namespace qv {
namespace {

const char* type_name(VkPhysicalDeviceType type) {
  switch (type) {
    case VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU:
      return "discrete";
    case VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU:
      return "integrated";
    case VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU:
      return "virtual";
    case VK_PHYSICAL_DEVICE_TYPE_CPU:
      return "cpu";
    default:
      return "other";
  }
}

// Names of VkComponentTypeKHR and of VkScopeKHR.
std::string component_name(int64_t type) {
  static const char* names[] = {"f16", "f32", "f64", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"};
  if (type == 1000141000) return "bf16";
  return type >= 0 && type < 11 ? names[type] : std::to_string(type);
}

std::string scope_name(int64_t scope) {
  static const char* names[] = {"0", "device", "workgroup", "subgroup", "4", "queue family"};
  return scope >= 0 && scope < 6 ? names[scope] : std::to_string(scope);
}

std::string version_text(uint32_t version) {
  return std::to_string(VK_API_VERSION_MAJOR(version)) + "." + std::to_string(VK_API_VERSION_MINOR(version)) + "." +
         std::to_string(VK_API_VERSION_PATCH(version));
}

void write_identity(Json& json, const Physical& device) {
  const VkPhysicalDeviceProperties& known = device.properties.properties;
  json.key("name").quote(known.deviceName);
  json.key("type").quote(type_name(known.deviceType));
  json.key("vendor_id").value(uint64_t{known.vendorID});
  json.key("device_id").value(uint64_t{known.deviceID});
  json.key("driver_name").quote(device.properties12.driverName);
  json.key("driver_info").quote(device.properties12.driverInfo);
  json.key("api_version").quote(version_text(known.apiVersion));
  json.key("device_uuid").hex(device.properties11.deviceUUID, VK_UUID_SIZE);
  json.key("driver_uuid").hex(device.properties11.driverUUID, VK_UUID_SIZE);
  json.key("missing").quote(device.missing());
}

void write_limits(Json& json, const Physical& device) {
  const VkPhysicalDeviceLimits& limits = device.limits();
  json.key("limits").open('{');
  json.key("max_storage_range").value(uint64_t{limits.maxStorageBufferRange});
  json.key("max_allocation").value(uint64_t{device.properties11.maxMemoryAllocationSize});
  json.key("max_groups").open('[');
  for (uint32_t most : limits.maxComputeWorkGroupCount) json.value(uint64_t{most});
  json.close(']').key("max_group_size").open('[');
  for (uint32_t most : limits.maxComputeWorkGroupSize) json.value(uint64_t{most});
  json.close(']');
  json.key("max_invocations").value(uint64_t{limits.maxComputeWorkGroupInvocations});
  json.key("shared_memory").value(uint64_t{limits.maxComputeSharedMemorySize});
  json.key("push_constants").value(uint64_t{limits.maxPushConstantsSize});
  json.key("storage_buffers").value(uint64_t{device.bindings()});
  json.key("storage_align").value(uint64_t{limits.minStorageBufferOffsetAlignment});
  json.key("timestamp_period").value(device.timestamp_bits() ? double{limits.timestampPeriod} : 0.0);
  json.key("cores").value(uint64_t{device.cores_nv.shaderSMCount});  // 0: not told
  json.close('}');
}

void write_memory(Json& json, const Physical& device) {
  json.key("heaps").open('[');
  for (uint32_t i = 0; i < device.memory.memoryHeapCount; ++i) {
    const VkMemoryHeap& heap = device.memory.memoryHeaps[i];
    json.open('{').key("bytes").value(uint64_t{heap.size});
    json.key("device_local").flag(heap.flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT).close('}');
  }
  json.close(']').key("local_input").flag(uploads_are_local(device));
  json.key("memory_types").open('[');
  for (uint32_t i = 0; i < device.memory.memoryTypeCount; ++i) {
    const VkMemoryType& type = device.memory.memoryTypes[i];
    json.open('{').key("heap").value(uint64_t{type.heapIndex});
    json.key("device_local").flag(type.propertyFlags & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT);
    json.key("host_visible").flag(type.propertyFlags & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT);
    json.key("coherent").flag(type.propertyFlags & VK_MEMORY_PROPERTY_HOST_COHERENT_BIT);
    json.key("cached").flag(type.propertyFlags & VK_MEMORY_PROPERTY_HOST_CACHED_BIT).close('}');
  }
  json.close(']');
}

void write_operations(Json& json, VkSubgroupFeatureFlags operations) {
  static const char* names[] = {"basic", "vote", "arithmetic", "ballot", "shuffle", "shuffle_relative", "clustered",
                                "quad"};
  json.key("operations").open('[');
  for (uint32_t bit = 0; bit < 8; ++bit) {
    if (operations >> bit & 1) json.quote(names[bit]);
  }
  json.close(']');
}

void write_subgroup(Json& json, const Physical& device) {
  uint32_t size = device.properties11.subgroupSize;
  const auto& control = device.properties13;
  bool required = device.features13.subgroupSizeControl &&
                  control.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT;
  json.key("subgroup").open('{');
  json.key("size").value(uint64_t{size});
  json.key("min").value(uint64_t{control.minSubgroupSize ? control.minSubgroupSize : size});
  json.key("max").value(uint64_t{control.maxSubgroupSize ? control.maxSubgroupSize : size});
  json.key("control").flag(required);
  json.key("full").flag(device.features13.computeFullSubgroups);
  write_operations(json, device.properties11.subgroupSupportedOperations);
  json.close('}');
}

void write_features(Json& json, const Physical& device) {
  const auto& f11 = device.features11;
  const auto& f12 = device.features12;
  const auto& f13 = device.features13;
  json.key("features").open('{');
  json.key("storage16").flag(f11.storageBuffer16BitAccess);
  json.key("storage8").flag(f12.storageBuffer8BitAccess);
  json.key("int8").flag(f12.shaderInt8);
  json.key("int16").flag(device.features.features.shaderInt16);
  json.key("int64").flag(device.features.features.shaderInt64);
  json.key("float16").flag(f12.shaderFloat16);
  json.key("integer_dot").flag(f13.shaderIntegerDotProduct);
  json.key("integer_dot_accelerated")
      .flag(device.properties13.integerDotProduct4x8BitPackedSignedAccelerated);
  json.key("timeline").flag(f12.timelineSemaphore);
  json.key("sync2").flag(f13.synchronization2);
  json.key("push_descriptor").flag(device.has(VK_KHR_PUSH_DESCRIPTOR_EXTENSION_NAME));
  json.key("memory_model").flag(f12.vulkanMemoryModel);
  json.key("cooperative_matrix").flag(device.cooperative.cooperativeMatrix && f12.vulkanMemoryModel);
  json.key("cooperative_matrix2").flag(device.has("VK_NV_cooperative_matrix2"));
  json.key("bfloat16").flag(device.bfloat16.shaderBFloat16Type);
  json.key("bfloat16_dot").flag(device.bfloat16.shaderBFloat16DotProduct);
  json.key("bfloat16_matrix").flag(device.bfloat16.shaderBFloat16CooperativeMatrix);
  json.close('}');
}

void write_matrices(Json& json, const Physical& device) {
  json.key("cooperative_matrix").open('[');
  for (const VkCooperativeMatrixPropertiesKHR& shape : device.matrices) {
    json.open('{');
    json.key("m").value(uint64_t{shape.MSize});
    json.key("n").value(uint64_t{shape.NSize});
    json.key("k").value(uint64_t{shape.KSize});
    json.key("a").quote(component_name(shape.AType));
    json.key("b").quote(component_name(shape.BType));
    json.key("c").quote(component_name(shape.CType));
    json.key("result").quote(component_name(shape.ResultType));
    json.key("saturating").flag(shape.saturatingAccumulation);
    json.key("scope").quote(scope_name(shape.scope));
    json.close('}');
  }
  json.close(']');
}

}  // namespace

std::string describe_devices(Instance& instance) {
  Json json;
  json.open('[');
  uint64_t index = 0;
  for (VkPhysicalDevice handle : instance.devices()) {
    const Physical device(instance, handle);
    json.open('{').key("index").value(index++);
    write_identity(json, device);
    write_limits(json, device);
    write_memory(json, device);
    write_subgroup(json, device);
    write_features(json, device);
    write_matrices(json, device);
    json.close('}');
  }
  json.close(']');
  return json.text;
}

}  // namespace qv
