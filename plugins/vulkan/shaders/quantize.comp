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
#include "quantization.glsl"

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

// The extent of the row, at index 0 of the shared arrays.
void measure(Origin o) {
    Extent e = Extent(0u, 0.0, 0.0);
    uint words = push.blocks * 8u;
    for (uint i = lane(); i < words * push.groups; i += gl_WorkGroupSize.x) {
        uint g = push.groups == 1u ? 0u : i / words;
        e = widened(e, read_columns(o, g, (i - g * words) * 4u, 0.0));
    }
    sizes[lane()] = e.size;
    lows[lane()] = e.low;
    highs[lane()] = e.high;
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

vec2 parameters(uint row, Origin o) {
    if (push.mode == GIVEN) return vec2(push.given_scale, float(push.given_zero));
    if (push.mode == PER_TOKEN) return vec2(token_scale[row], float(token_zero[row]));
    measure(o);
    return dynamic_parameters(Extent(sizes[0], lows[0], highs[0]), push.mode);
}

// Writes the codes of a group's words `first`, `first + step`, ...; returns the sum of their q - z.
int write_codes(uint row, Origin o, uint g, uint first, uint step, vec2 parameters) {
    uint words = push.blocks * 8u;
    int total = 0;
    for (uint i = first; i < words; i += step) {
        bvec4 exists = which_exist(count_columns(g, i * 4u));
        ivec4 q = mix(ivec4(0), codes_of(read_columns(o, g, i * 4u, outside(parameters)), parameters), exists);
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
