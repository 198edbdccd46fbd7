#include "capabilities.h"

#include "error.h"
#include "qcore_vulkan.h"

namespace qv {
namespace {

constexpr uint32_t kMagic = 0x07230203, kHeaderWords = 5, kOpCapability = 17;

struct Capability {
  uint32_t number;
  const char* name;
  bool present;
};

bool subgroups(const Physical& device, VkSubgroupFeatureFlags operation) {
  return device.properties11.subgroupSupportedOperations & operation;
}

// Enums of SPIR-V; those of extensions newer than the headers have no names there.
std::vector<Capability> known(const Physical& d) {
  const auto& core = d.features.features;
  const bool dot = d.features13.shaderIntegerDotProduct;
  return {
      {1, "Shader", true},
      {9, "Float16", bool(d.features12.shaderFloat16)},
      {11, "Int64", bool(core.shaderInt64)},
      {22, "Int16", bool(core.shaderInt16)},
      {39, "Int8", bool(d.features12.shaderInt8)},
      {61, "GroupNonUniform", subgroups(d, VK_SUBGROUP_FEATURE_BASIC_BIT)},
      {62, "GroupNonUniformVote", subgroups(d, VK_SUBGROUP_FEATURE_VOTE_BIT)},
      {63, "GroupNonUniformArithmetic", subgroups(d, VK_SUBGROUP_FEATURE_ARITHMETIC_BIT)},
      {64, "GroupNonUniformBallot", subgroups(d, VK_SUBGROUP_FEATURE_BALLOT_BIT)},
      {65, "GroupNonUniformShuffle", subgroups(d, VK_SUBGROUP_FEATURE_SHUFFLE_BIT)},
      {66, "GroupNonUniformShuffleRelative", subgroups(d, VK_SUBGROUP_FEATURE_SHUFFLE_RELATIVE_BIT)},
      {67, "GroupNonUniformClustered", subgroups(d, VK_SUBGROUP_FEATURE_CLUSTERED_BIT)},
      {68, "GroupNonUniformQuad", subgroups(d, VK_SUBGROUP_FEATURE_QUAD_BIT)},
      {4433, "StorageBuffer16BitAccess", bool(d.features11.storageBuffer16BitAccess)},
      {4448, "StorageBuffer8BitAccess", bool(d.features12.storageBuffer8BitAccess)},
      {5116, "BFloat16TypeKHR", bool(d.bfloat16.shaderBFloat16Type)},
      {5117, "BFloat16DotProductKHR", bool(d.bfloat16.shaderBFloat16DotProduct)},
      {5118, "BFloat16CooperativeMatrixKHR", bool(d.bfloat16.shaderBFloat16CooperativeMatrix)},
      {5345, "VulkanMemoryModel", bool(d.features12.vulkanMemoryModel)},
      {5346, "VulkanMemoryModelDeviceScope", bool(d.features12.vulkanMemoryModelDeviceScope)},
      {6016, "DotProductInputAll", dot},
      {6017, "DotProductInput4x8Bit", dot},
      {6018, "DotProductInput4x8BitPacked", dot},
      {6019, "DotProduct", dot},
      {6022, "CooperativeMatrixKHR", d.cooperative.cooperativeMatrix && d.features12.vulkanMemoryModel},
  };
}

std::string lacking_of(const std::vector<Capability>& capabilities, uint32_t number) {
  for (const Capability& capability : capabilities) {
    if (capability.number == number) return capability.present ? "" : capability.name;
  }
  return "SPIR-V capability " + std::to_string(number) + ", which this library does not enable";
}

// The newest version of SPIR-V that a device takes, as the second word of a module holds it.
uint32_t newest(const Physical& device) { return device.at_least(VK_API_VERSION_1_3) ? 0x00010600 : 0x00010500; }

}  // namespace

std::string lacking_capability(const Physical& device, const uint32_t* spirv, uint64_t bytes) {
  const uint64_t words = bytes / 4;
  const bool right = spirv && bytes % 4 == 0 && words > kHeaderWords && spirv[0] == kMagic;
  if (!right) throw Error(QV_INVALID, "not a SPIR-V module");
  const std::vector<Capability> capabilities = known(device);
  std::string lacking = spirv[1] > newest(device) ? "a newer version of SPIR-V" : "";
  uint64_t at = kHeaderWords;
  while (at < words && spirv[at] >> 16) {
    if ((spirv[at] & 0xffff) == kOpCapability && lacking.empty() && at + 1 < words) {
      lacking = lacking_of(capabilities, spirv[at + 1]);
    }
    at += spirv[at] >> 16;
  }
  if (at != words) throw Error(QV_INVALID, "a SPIR-V module that is not whole");
  return lacking;
}

}  // namespace qv
