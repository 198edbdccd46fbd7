// Parameters of batch norms, by channel, and what they make of an element. Needs functions.glsl.

layout(constant_id = 10) const uint NORMALIZED = 0u;  // bit 0: mean and variance; 1: a weight; 2: a bias
layout(binding = 3) readonly buffer Mean { float mean[]; };
layout(binding = 4) readonly buffer Variance { float variance[]; };
layout(binding = 5) readonly buffer Weight { float norm_weight[]; };
layout(binding = 6) readonly buffer Added { float norm_bias[]; };

float normalized(float x, uint channel, float eps) {
    if (NORMALIZED == 0u) return x;
    float factor = divide((NORMALIZED & 2u) != 0u ? norm_weight[channel] : 1.0, sqrt(variance[channel] + eps));
    return (x - mean[channel]) * factor + ((NORMALIZED & 4u) != 0u ? norm_bias[channel] : 0.0);
}
