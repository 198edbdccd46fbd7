// Compute pipelines of one device, and their cache on disk.
#pragma once

#include <string>
#include <vector>

#include "context.h"

namespace qv {

constexpr uint32_t kPushBytes = 128;  // what every device has

// The cache of one driver build: <folder>/<driver>-<pipeline cache>.bin, both UUIDs. A file that is not whole, or that
// another driver wrote, counts as absent.
class CacheFile {
 public:
  CacheFile(const Physical& device, const std::string& folder);

  std::vector<char> read() const;
  void write(const std::vector<char>& data) const;  // failing quietly: a cache may be absent

 private:
  bool fits(const std::vector<char>& data) const;

  const Physical& device_;
  std::string path_;
};

class Pipelines {
 public:
  Pipelines(Context& context, const std::string& cache_folder);
  ~Pipelines();
  Pipelines(const Pipelines&) = delete;
  Pipelines& operator=(const Pipelines&) = delete;

  // See qv_pipeline.
  uint32_t add(const uint32_t* spirv, uint64_t bytes, const uint32_t* constants, uint32_t count, uint32_t subgroup);
  VkPipeline at(uint32_t id) const;
  size_t count() const { return made_.size(); }
  void save();

  VkPipelineLayout layout = VK_NULL_HANDLE;

 private:
  void create_layout();
  void create_cache();
  void release();
  VkPipeline create(VkShaderModule module, const VkSpecializationInfo& special, uint32_t subgroup);

  Context& context_;
  const CacheFile file_;
  VkDescriptorSetLayout set_ = VK_NULL_HANDLE;
  VkPipelineCache cache_ = VK_NULL_HANDLE;
  std::vector<VkPipeline> made_;
  size_t saved_ = 0;
};

}  // namespace qv
