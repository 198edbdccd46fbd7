// Activations to int8 codes, a workgroup per row: q = clamp(round(x / s) + z, -128, 127), codes padded with 0 group by
// group as the weight is. Also each row's s and z, and for each group the sum of q - z.
//
// A group of columns belongs to a team of lanes, so that its sum is made of few partial sums; with more groups than
// lanes a team is a single lane.

#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

#include "formats.glsl"
#include "source.glsl"

const uint SYMMETRIC = 0u;
const uint ASYMMETRIC = 1u;
const uint GIVEN = 2u;
const uint PER_TOKEN = 3u;

const float SMALLEST = 1.17549435e-38;
const uint INFINITE = 0x7f800000u;

layout(binding = 1) readonly buffer GivenScale { float token_scale[]; };
layout(binding = 2) readonly buffer GivenZero { int token_zero[]; };
layout(binding = 5) writeonly buffer Scales { float row_scale[]; };
layout(binding = 5) writeonly buffer Zeros { int row_int[]; };
layout(binding = 7) writeonly buffer Codes { uint codes[]; };

shared uint sizes[gl_WorkGroupSize.x];
shared float lows[gl_WorkGroupSize.x];
shared float highs[gl_WorkGroupSize.x];
shared int totals[gl_WorkGroupSize.x];

uint lane() {
    return gl_LocalInvocationID.x;
}

uint team_size() {
    uint team = gl_WorkGroupSize.x;
    while (team > 1u && team * push.groups > gl_WorkGroupSize.x) team /= 2u;
    return team;
}

// Largest |x| as bits, whose order is that of the numbers with NaN above all; smallest and largest x, and 0.
void measure(Origin o) {
    uint size = 0u;
    float low = 0.0;
    float high = 0.0;
    uint words = push.blocks * 8u;
    for (uint i = lane(); i < words * push.groups; i += gl_WorkGroupSize.x) {
        uint g = push.groups == 1u ? 0u : i / words;
        vec4 x = read_columns(o, g, (i - g * words) * 4u, 0.0);
        uvec4 bits = floatBitsToUint(x) & 0x7fffffffu;
        size = max(size, max(max(bits.x, bits.y), max(bits.z, bits.w)));
        low = min(low, min(min(x.x, x.y), min(x.z, x.w)));
        high = max(high, max(max(x.x, x.y), max(x.z, x.w)));
    }
    sizes[lane()] = size;
    lows[lane()] = low;
    highs[lane()] = high;
    for (uint reach = gl_WorkGroupSize.x / 2u; reach > 0u; reach /= 2u) {
        barrier();
        if (lane() < reach) {
            sizes[lane()] = max(sizes[lane()], sizes[lane() + reach]);
            lows[lane()] = min(lows[lane()], lows[lane() + reach]);
            highs[lane()] = max(highs[lane()], highs[lane() + reach]);
        }
    }
    barrier();
}

// Scale and zero point of the row. A row of zeros has scale 1; one that is not finite has NaN, which its results keep.
vec2 parameters(uint row, Origin o) {
    if (push.mode == GIVEN) return vec2(push.given_scale, float(push.given_zero));
    if (push.mode == PER_TOKEN) return vec2(token_scale[row], float(token_zero[row]));
    measure(o);
    if (sizes[0] == 0u) return vec2(1.0, push.mode == SYMMETRIC ? 0.0 : -128.0);
    if (sizes[0] >= INFINITE) return vec2(uintBitsToFloat(0x7fc00000u), 0.0);
    if (push.mode == SYMMETRIC) return vec2(max(uintBitsToFloat(sizes[0]) / 127.0, SMALLEST), 0.0);
    float scale = max((highs[0] - lows[0]) / 255.0, SMALLEST);
    return vec2(scale, clamp(roundEven(-128.0 - lows[0] / scale), -128.0, 127.0));
}

ivec4 quantize(vec4 x, vec2 row) {
    if (DTYPE == INT8) return ivec4(x);
    return ivec4(clamp(roundEven(x / row.x) + row.y, vec4(-128.0), vec4(127.0)));
}

// Writes the codes of a group's words `first`, `first + step`, ...; returns the sum of their q - z.
int write_codes(uint row, Origin o, uint g, uint first, uint step, vec2 parameters) {
    uint words = push.blocks * 8u;
    float outside = DTYPE == INT8 ? parameters.y : 0.0;
    int total = 0;
    for (uint i = first; i < words; i += step) {
        bvec4 exists = lessThan(uvec4(0u, 1u, 2u, 3u), uvec4(count_columns(g, i * 4u)));
        ivec4 q = mix(ivec4(0), quantize(read_columns(o, g, i * 4u, outside), parameters), exists);
        ivec4 centred = mix(ivec4(0), q - int(parameters.y), exists);
        total += centred.x + centred.y + centred.z + centred.w;
        codes[(row * push.groups + g) * words + i] = pack_bytes(q);
    }
    return total;
}

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.y * push.grid;
    if (row >= push.all_rows) return;
    Origin o = origin(row);
    vec2 found = parameters(row, o);
    uint team = team_size();
    uint member = lane() % team;
    uint teams = gl_WorkGroupSize.x / team;
    for (uint start = 0u; start < push.groups; start += teams) {
        uint g = start + lane() / team;
        totals[lane()] = g < push.groups ? write_codes(row, o, g, member, team, found) : 0;
        for (uint reach = team / 2u; reach > 0u; reach /= 2u) {
            barrier();
            if (member < reach) totals[lane()] += totals[lane() + reach];
        }
        if (member == 0u && g < push.groups) row_int[push.all_rows * 2u + row * push.groups + g] = totals[lane()];
    }
    if (lane() == 0u) {
        row_scale[row] = found.x;
        row_int[push.all_rows + row] = int(found.y);
    }
}
