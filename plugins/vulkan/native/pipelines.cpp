#include "pipelines.h"

#include "capabilities.h"
#include "error.h"
#include "qcore_vulkan.h"

namespace qv {

Pipelines::Pipelines(Context& context, const std::string& cache_folder)
    : context_(context), file_(*context.physical, cache_folder) {
  try {
    create_layout();
    create_cache();
  } catch (...) {
    release();
    throw;
  }
}

Pipelines::~Pipelines() { release(); }

void Pipelines::release() {
  const auto& vk = context_.vk;
  for (VkPipeline pipeline : made_) vk.vkDestroyPipeline(context_.device, pipeline, nullptr);
  if (cache_) vk.vkDestroyPipelineCache(context_.device, cache_, nullptr);
  if (layout) vk.vkDestroyPipelineLayout(context_.device, layout, nullptr);
  if (set_) vk.vkDestroyDescriptorSetLayout(context_.device, set_, nullptr);
}

void Pipelines::create_layout() {
  VkDescriptorSetLayoutBinding bindings[kBindings]{};
  const uint32_t count = context_.physical->bindings();
  for (uint32_t i = 0; i < count; ++i) {
    bindings[i].binding = i;
    bindings[i].descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
    bindings[i].descriptorCount = 1;
    bindings[i].stageFlags = VK_SHADER_STAGE_COMPUTE_BIT;
  }
  VkDescriptorSetLayoutCreateInfo set{VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO};
  set.flags = VK_DESCRIPTOR_SET_LAYOUT_CREATE_PUSH_DESCRIPTOR_BIT_KHR;
  set.bindingCount = count;
  set.pBindings = bindings;
  check(context_.vk.vkCreateDescriptorSetLayout(context_.device, &set, nullptr, &set_), "vkCreateDescriptorSetLayout");
  VkPushConstantRange push{VK_SHADER_STAGE_COMPUTE_BIT, 0, kPushBytes};
  VkPipelineLayoutCreateInfo info{VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO};
  info.setLayoutCount = 1;
  info.pSetLayouts = &set_;
  info.pushConstantRangeCount = 1;
  info.pPushConstantRanges = &push;
  check(context_.vk.vkCreatePipelineLayout(context_.device, &info, nullptr, &layout), "vkCreatePipelineLayout");
}

void Pipelines::create_cache() {
  const std::vector<char> data = file_.read();
  VkPipelineCacheCreateInfo info{VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO};
  info.initialDataSize = data.size();
  info.pInitialData = data.data();
  check(context_.vk.vkCreatePipelineCache(context_.device, &info, nullptr, &cache_), "vkCreatePipelineCache");
}

void Pipelines::save() {
  if (saved_ == made_.size()) return;
  saved_ = made_.size();
  size_t bytes = 0;
  if (context_.vk.vkGetPipelineCacheData(context_.device, cache_, &bytes, nullptr) != VK_SUCCESS) return;
  std::vector<char> data(bytes);
  if (context_.vk.vkGetPipelineCacheData(context_.device, cache_, &bytes, data.data()) != VK_SUCCESS) return;
  data.resize(bytes);
  file_.write(data);
}

VkPipeline Pipelines::at(uint32_t id) const {
  if (id >= made_.size()) throw Error(QV_INVALID, "no pipeline has the number " + std::to_string(id));
  return made_[id];
}

uint32_t Pipelines::add(const uint32_t* spirv, uint64_t bytes, const uint32_t* constants, uint32_t count,
                        uint32_t subgroup) {
  const std::string lacking = lacking_capability(*context_.physical, spirv, bytes);
  if (!lacking.empty()) throw Error(QV_UNSUPPORTED, "the device lacks what the shader needs: " + lacking);
  if (subgroup && !context_.can_require_subgroup(subgroup)) {
    throw Error(QV_UNSUPPORTED, "the device cannot be asked for subgroups of " + std::to_string(subgroup));
  }
  std::vector<VkSpecializationMapEntry> entries(count);
  for (uint32_t i = 0; i < count; ++i) entries[i] = {i, i * 4, 4};
  const VkSpecializationInfo special{count, entries.data(), count * sizeof(uint32_t), constants};
  VkShaderModuleCreateInfo info{VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO};
  info.codeSize = bytes;
  info.pCode = spirv;
  made_.reserve(made_.size() + 1);
  VkShaderModule module;
  check(context_.vk.vkCreateShaderModule(context_.device, &info, nullptr, &module), "vkCreateShaderModule");
  try {
    made_.push_back(create(module, special, subgroup));
  } catch (...) {
    context_.vk.vkDestroyShaderModule(context_.device, module, nullptr);
    throw;
  }
  context_.vk.vkDestroyShaderModule(context_.device, module, nullptr);
  return static_cast<uint32_t>(made_.size() - 1);
}

VkPipeline Pipelines::create(VkShaderModule module, const VkSpecializationInfo& special, uint32_t subgroup) {
  VkPipelineShaderStageRequiredSubgroupSizeCreateInfo size{
      VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO};
  size.requiredSubgroupSize = subgroup;
  VkComputePipelineCreateInfo info{VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO};
  info.layout = layout;
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = module;
  info.stage.pName = "main";
  info.stage.pSpecializationInfo = &special;
  if (subgroup) {
    info.stage.pNext = &size;
    if (context_.physical->features13.computeFullSubgroups) {
      info.stage.flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT;
    }
  }
  VkPipeline pipeline = VK_NULL_HANDLE;
  VkResult result = context_.vk.vkCreateComputePipelines(context_.device, cache_, 1, &info, nullptr, &pipeline);
  // Compilers of drivers fail in their own ways: all but exhaustion and loss mean that this shader is not to be had.
  if (result < 0 && result != VK_ERROR_DEVICE_LOST && result != VK_ERROR_OUT_OF_DEVICE_MEMORY &&
      result != VK_ERROR_OUT_OF_HOST_MEMORY) {
    throw Error(QV_UNSUPPORTED, "the driver cannot compile the shader: VkResult " + std::to_string(int(result)));
  }
  check(result, "vkCreateComputePipelines");
  return pipeline;
}

}  // namespace qv
