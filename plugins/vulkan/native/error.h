// Failures inside the library are exceptions; the C interface turns them into codes and texts.
#pragma once

#include <vulkan/vulkan_core.h>

#include <stdexcept>
#include <string>

namespace qv {

class Error : public std::runtime_error {
 public:
  Error(int code, const std::string& text) : std::runtime_error(text), code(code) {}
  const int code;  // of qcore_vulkan.h
};

// Throws the error that a VkResult means; positive results are successes.
void check(VkResult result, const char* call);

}  // namespace qv
