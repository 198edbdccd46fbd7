// What a shader declares that it needs, against what a device has.
#pragma once

#include <string>

#include "physical.h"

namespace qv {

// The first capability of a SPIR-V module that the device lacks, by name; empty if it lacks none. Throws QV_INVALID
// for what is no SPIR-V module.
std::string lacking_capability(const Physical& device, const uint32_t* spirv, uint64_t bytes);

}  // namespace qv
