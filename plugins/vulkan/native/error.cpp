#include "error.h"

#include "qcore_vulkan.h"

namespace qv {
namespace {

struct Meaning {
  VkResult result;
  int code;
  const char* name;
};

constexpr Meaning kMeanings[] = {
    {VK_ERROR_OUT_OF_HOST_MEMORY, QV_OUT_OF_MEMORY, "VK_ERROR_OUT_OF_HOST_MEMORY"},
    {VK_ERROR_OUT_OF_DEVICE_MEMORY, QV_OUT_OF_MEMORY, "VK_ERROR_OUT_OF_DEVICE_MEMORY"},
    {VK_ERROR_TOO_MANY_OBJECTS, QV_OUT_OF_MEMORY, "VK_ERROR_TOO_MANY_OBJECTS"},
    {VK_ERROR_DEVICE_LOST, QV_DEVICE_LOST, "VK_ERROR_DEVICE_LOST"},
    {VK_ERROR_INITIALIZATION_FAILED, QV_UNAVAILABLE, "VK_ERROR_INITIALIZATION_FAILED"},
    {VK_ERROR_INCOMPATIBLE_DRIVER, QV_UNAVAILABLE, "VK_ERROR_INCOMPATIBLE_DRIVER"},
    {VK_ERROR_LAYER_NOT_PRESENT, QV_UNAVAILABLE, "VK_ERROR_LAYER_NOT_PRESENT"},
    {VK_ERROR_EXTENSION_NOT_PRESENT, QV_UNSUPPORTED, "VK_ERROR_EXTENSION_NOT_PRESENT"},
    {VK_ERROR_FEATURE_NOT_PRESENT, QV_UNSUPPORTED, "VK_ERROR_FEATURE_NOT_PRESENT"},
};

}  // namespace

void check(VkResult result, const char* call) {
  if (result >= 0) return;
  for (const Meaning& meaning : kMeanings) {
    if (meaning.result == result) throw Error(meaning.code, std::string(call) + ": " + meaning.name);
  }
  throw Error(QV_ERROR, std::string(call) + ": VkResult " + std::to_string(static_cast<int>(result)));
}

}  // namespace qv
