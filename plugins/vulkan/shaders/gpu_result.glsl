// Results of kernels for GPUs: float32 or 16-bit floats. Needs formats.glsl.

layout(set = 0, binding = 6) writeonly buffer Result32 { float result32[]; };
layout(set = 0, binding = 6) writeonly buffer Result16 { uint16_t result16[]; };

void write_result(uint index, float value, uint dtype) {
    if (dtype == F32) {
        result32[index] = value;
    } else {
        result16[index] = uint16_t(dtype == F16 ? half_bits(value) : bfloat_bits(value));
    }
}
