// Activations to int8 codes, a workgroup per row: q = clamp(round(x / s) + z, -128, 127), codes padded with 0 group by
// group as the weight is. Also each row's s and z, and for each group the sum of q - z.
//
// A group of columns belongs to a team of lanes, so that its sum is made of few partial sums; with more groups than
// lanes a team is a single lane and has several groups. A word is four columns, one word of codes. With KEPT, a lane
// keeps all its words, at most KEPT, in registers between finding the parameters and using them; else it reads them
// from global memory twice. Shared memory holds one value a lane, for the reductions.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 4) const uint KEPT = 0u;

#include "formats.glsl"
#include "source.glsl"
#include "quantization.glsl"

layout(binding = 1) readonly buffer GivenScale { float token_scale[]; };
layout(binding = 2) readonly buffer GivenZero { int token_zero[]; };
layout(binding = 5) writeonly buffer Scales { float row_scale[]; };
layout(binding = 5) writeonly buffer Zeros { int row_int[]; };
layout(binding = 7) writeonly buffer Codes { uint codes[]; };

// One value a lane: the extent, then the sums of codes.
shared uint sizes[gl_WorkGroupSize.x];
shared float lows[gl_WorkGroupSize.x];
shared float highs[gl_WorkGroupSize.x];
shared int totals[gl_WorkGroupSize.x];

vec4 kept[KEPT + 1u];  // one more: an array of none is not allowed

uint lane() {
    return gl_LocalInvocationID.x;
}

// Lanes of a team: the largest power of two with which every group has a team, at least 1.
uint team_size() {
    uint team = gl_WorkGroupSize.x;
    while (team > 1u && team * push.groups > gl_WorkGroupSize.x) team /= 2u;
    return team;
}

uint words_of_group() {
    return push.steps * 4u;
}

// Words that a lane has, at most.
uint count_words(uint team) {
    if (team > 1u) return (words_of_group() + team - 1u) / team;
    return (push.groups + gl_WorkGroupSize.x - 1u) / gl_WorkGroupSize.x * words_of_group();
}

// A word of a group of columns.
struct Place {
    uint group;
    uint word;
};

Place first_place(uint team) {
    return Place(lane() / team, lane() % team);
}

// The lane's next word; the first one of its next group after the last one of a group.
Place next_place(Place p, uint team) {
    p.word += team;
    return p.word < words_of_group() ? p : Place(p.group + gl_WorkGroupSize.x / team, lane() % team);
}

bool is_place(Place p) {
    return p.group < push.groups && p.word < words_of_group();
}

vec4 read_place(Origin o, Place p, float outside) {
    return is_place(p) ? read_columns(o, p.group, p.word * 4u, outside) : vec4(0.0);
}

// Reads all of the lane's words into registers.
void keep(Origin o, uint team, float outside) {
    Place p = first_place(team);
    [[unroll]] for (uint t = 0u; t < KEPT; ++t) {
        kept[t] = read_place(o, p, outside);
        p = next_place(p, team);
    }
}

Extent lane_extent(Origin o, uint team) {
    Extent e = Extent(0u, 0.0, 0.0);
    if (KEPT > 0u) {
        [[unroll]] for (uint t = 0u; t < KEPT; ++t) e = widened(e, kept[t]);
        return e;
    }
    Place p = first_place(team);
    for (uint t = 0u; t < count_words(team); ++t) {
        e = widened(e, read_place(o, p, 0.0));
        p = next_place(p, team);
    }
    return e;
}

// The extent of the row, by a tree in shared memory: each barrier waits for the writes of the round before, the last
// one for lane 0's result. Minimum and maximum are exact, so the order of lanes does not matter.
Extent extent(Origin o, uint team) {
    Extent e = lane_extent(o, team);
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
    return Extent(sizes[0], lows[0], highs[0]);
}

bool is_given() {
    return push.mode == GIVEN || push.mode == PER_TOKEN;
}

vec2 given_parameters(uint row) {
    if (push.mode == PER_TOKEN) return vec2(token_scale[row], float(token_zero[row]));
    return vec2(push.given_scale, float(push.given_zero));
}

// Writes the codes of a word; returns the sum of their q - z, an exact int32. Columns that do not exist have code 0 and
// add nothing.
int write_codes(uint row, Place p, vec4 x, vec2 parameters) {
    bvec4 exists = which_exist(count_columns(p.group, p.word * 4u));
    ivec4 q = mix(ivec4(0), codes_of(x, parameters), exists);
    codes[(row * push.groups + p.group) * words_of_group() + p.word] = pack_bytes(q);
    ivec4 centred = mix(ivec4(0), q - int(parameters.y), exists);
    return centred.x + centred.y + centred.z + centred.w;
}

void write_sum(uint row, uint g, int total) {
    row_int[push.all_rows * 2u + row * push.groups + g] = total;
}

// The sum of a group that several lanes share. No team has more than one group then.
void add_up(uint row, uint team, int total) {
    totals[lane()] = total;
    for (uint reach = team / 2u; reach > 0u; reach /= 2u) {
        barrier();
        if (lane() % team < reach) totals[lane()] += totals[lane() + reach];
    }
    uint g = lane() / team;
    if (lane() % team == 0u && g < push.groups) write_sum(row, g, totals[lane()]);
}

void main() {
    uint row = gl_WorkGroupID.x + gl_WorkGroupID.y * push.grid;
    if (row >= push.all_rows) return;  // the whole workgroup, so that no barrier waits for it
    // 1. Given parameters, which say what the padding of an image holds; with KEPT the whole row to registers.
    Origin o = origin(row);
    uint team = team_size();
    vec2 found = is_given() ? given_parameters(row) : vec2(0.0);
    float edge = outside(found);
    if (KEPT > 0u) keep(o, team, edge);
    // 2. Else parameters from the extent of the row, to which all lanes contribute.
    if (!is_given()) found = dynamic_parameters(extent(o, team), push.mode);

    // 3. The codes, from registers or from memory again. A single lane's group ends inside the loop, a team's sum is
    //    completed by all of it.
    int total = 0;
    Place p = first_place(team);
    uint count = KEPT > 0u ? KEPT : count_words(team);
    [[unroll]] for (uint t = 0u; t < count; ++t) {
        if (is_place(p)) total += write_codes(row, p, KEPT > 0u ? kept[t] : read_place(o, p, edge), found);
        Place next = next_place(p, team);
        if (team == 1u && next.group != p.group) {
            if (p.group < push.groups) write_sum(row, p.group, total);
            total = 0;
        }
        p = next;
    }
    // 4. Sums of groups that several lanes share, then the parameters.
    if (team > 1u) add_up(row, team, total);
    if (lane() == 0u) {
        row_scale[row] = found.x;
        row_int[push.all_rows + row] = int(found.y);
    }
}
