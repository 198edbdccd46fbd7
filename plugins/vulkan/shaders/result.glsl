// Results: float32 if WIDE is set, else 16-bit floats stored one by one.

layout(binding = 7) writeonly buffer Float32Result { float float32_result[]; };
layout(binding = 7) writeonly buffer Float16Result { uint16_t float16_result[]; };

void store_float(uint place, float y, uint dtype) {
    if (WIDE != 0u) {
        float32_result[place] = y;
    } else {
        float16_result[place] = uint16_t(dtype == BF16 ? bfloat_bits(y) : half_bits(y));
    }
}
