// Attention in one pass over the keys, with online softmax: softmax(q k^T scale + mask) v.
//
// A workgroup takes ROWS rows of queries of one key head (the positions of all query heads that share it, heads
// innermost, so that keys and values are read once for all of them), and a range of keys, KEYS at a time:
//
// 1. Scores: a team of TEAM lanes per key multiplies it by all rows' queries, which lie in shared memory. Keys that the
//    mask hides from every row are not read: static caches are mostly empty. A mask of the least float hides as well,
//    but rows that see nothing else take the mean of such keys.
// 2. Softmax: a subgroup for four rows finds the largest score so far, and turns scores into powers of two.
// 3. Values: lanes side by side take fours of the values' columns, groups of lanes the keys in turn; each lane adds up
//    its columns for all rows in registers. A value that has no weight is not read.
//
// At the end the groups' sums are added in shared memory. If the keys are split over workgroups, each writes its sums
// with the largest score and the sum of weights, and attention_join makes results of them. JOINED: the workgroup of a
// key head that ends last does so itself, which spares a step that waits.

#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;
layout(constant_id = 0) const uint LANES = 128u;
layout(constant_id = 1) const uint ROWS = 4u;     // a multiple of 4
layout(constant_id = 2) const uint KEYS = 64u;
layout(constant_id = 3) const uint TEAM = 8u;     // a power of two, at most a subgroup
layout(constant_id = 4) const uint Q4 = 16u;      // fours of columns of queries and keys
layout(constant_id = 5) const uint V4 = 16u;      // fours of columns of values
layout(constant_id = 6) const uint ALIGNED = 1u;  // whether these are whole and aligned
layout(constant_id = 7) const uint MASK = 0u;
layout(constant_id = 8) const uint CAUSAL = 0u;
layout(constant_id = 9) const uint SPLIT = 0u;    // whether partial results are written
layout(constant_id = 10) const uint EACH_TEAM = 1u;  // keys of a team at once; KEYS is a multiple of all teams'
// Whether each lane reads one row's query and gets the others by shuffles: for subgroups of ROWS lanes, teams of one.
// CPUs emulate subgroups by vectors and read shared memory lane by lane, so that reads are what takes time.
layout(constant_id = 11) const uint SPREAD = 0u;
layout(constant_id = 12) const uint ALONE = 0u;  // whether the workgroup is one subgroup
layout(constant_id = 13) const uint VALUES = 1u;  // keys whose values a lane reads before it uses the first

const uint FLOAT_MASK = 1u;  // added to the scores
const uint BOOL_MASK = 2u;   // an int32, not 0 where a key takes part

const uint TEAMS = LANES / TEAM;
const uint WIDTH = LANES < V4 ? LANES : V4;             // lanes side by side in the values' columns
const uint GROUPS = LANES / WIDTH;              // of lanes, which share the keys
const uint EACH = (V4 + WIDTH - 1u) / WIDTH;    // fours of columns of a lane
const uint FOURS = ROWS / 4u;
const uint PITCH = FOURS + 1u;                  // vec4 from one key's weights to the next, against bank conflicts

layout(push_constant) uniform Push {
    uint rows, queries, keys;  // rows of a key head: positions by query heads that share it
    uint shared_by;            // query heads for each key head
    uint heads;                // key heads
    uint q_columns, v_columns;
    uint split;                // keys of a workgroup, a multiple of KEYS
    uint q_stride[3], k_stride[3], v_stride[3], y_stride[3];  // of batch, head, position
    uint m_stride[4];                                         // of batch, query head, position, key
    uint q_offset, k_offset, v_offset, m_offset, y_offset;
    float scale;               // of scores, to base 2
} push;

layout(binding = 0) readonly buffer Q { float q_words[]; };
layout(binding = 0) readonly buffer Qs { vec4 q_vectors[]; };
layout(binding = 1) readonly buffer K { float k_words[]; };
layout(binding = 1) readonly buffer Ks { vec4 k_vectors[]; };
layout(binding = 2) readonly buffer V { float v_words[]; };
layout(binding = 2) readonly buffer Vs { vec4 v_vectors[]; };
layout(binding = 3) readonly buffer Mask { uint mask[]; };
#ifdef JOINED
#define RESULT 5
#define PARTIAL coherent
layout(binding = 4) coherent buffer Ended { uint ended[]; };  // workgroups of each key head, 0 before and after
#else
#define RESULT 7
#define PARTIAL writeonly
#endif
layout(binding = RESULT) writeonly buffer Result { float result[]; };
layout(binding = RESULT) writeonly buffer Results { vec4 results[]; };
layout(binding = 6) PARTIAL buffer Totals { vec2 totals[]; };   // [split][row]: largest score, sum of weights
layout(binding = 7) PARTIAL buffer Partial { vec4 partial[]; };  // [split][row][four]

shared vec4 query[ROWS * Q4];
shared vec4 weight[KEYS * PITCH];  // [key][row]: scores, then their powers
shared vec4 factor[FOURS];         // of what each row has added up so far
shared vec4 most[FOURS];           // the largest of each row's scores so far
shared vec4 total[FOURS];          // of its weights
shared uint sees[ROWS];            // the key before which its keys end
shared uint mask_row[ROWS];        // where its mask begins
shared vec4 part[WIDTH * EACH * GROUPS];
shared uint met[3];                // whether a row sees one of these keys; of those before and after them as well
shared uint before;                // workgroups that have ended before this one

#define LOWEST uintBitsToFloat(0xff800000u)
#define LEAST uintBitsToFloat(0xff7fffffu)  // the least float
#define FAR -1e38                           // what absorbs every score

vec4 sums[ROWS * EACH];

// A barrier; CPUs save all registers at those of a workgroup.
void wait() {
    if (ALONE != 0u) subgroupBarrier();
    else barrier();
}

// Four columns of a query, key or value whose first element is `at`.
#define DEFINE_READ(name, words, vectors, columns)                                    \
    vec4 name(uint at, uint four) {                                                   \
        if (ALIGNED != 0u) return vectors[at / 4u + four];                            \
        vec4 value = vec4(0.0);                                                       \
        for (uint e = 0u; e < 4u; ++e) {                                              \
            if (four * 4u + e < columns) value[e] = words[at + four * 4u + e];        \
        }                                                                             \
        return value;                                                                 \
    }

DEFINE_READ(read_query, q_words, q_vectors, push.q_columns)
DEFINE_READ(read_key, k_words, k_vectors, push.q_columns)
DEFINE_READ(read_value, v_words, v_vectors, push.v_columns)

// What is added to the score of a key for a row.
float bias(uint r, uint key) {
    if (key >= sees[r]) return LOWEST;
    if (MASK == 0u) return 0.0;
    uint word = mask[mask_row[r] + key * push.m_stride[3]];
    if (MASK == BOOL_MASK) return word != 0u ? 0.0 : LOWEST;
    float added = uintBitsToFloat(word) * 1.44269504;
    return added == LOWEST && uintBitsToFloat(word) != LOWEST ? LEAST : added;
}

// The `bias` of a key for every row. Heads that share their keys mostly share their mask as well: it is read once.
void biases(uint key, out float found[ROWS]) {
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        bool known = r > 0u && mask_row[r] == mask_row[r - 1u] && sees[r] == sees[r - 1u];
        if (known) found[r] = found[r - 1u];
        else found[r] = bias(r, key);
    }
}

// What `bias` needs of a row. Found once: integer division is slow.
void prepare_row(uint r, uint row, uint end, uint batch, uint head) {
    uint position = row / push.shared_by;
    uint query_head = head * push.shared_by + row - position * push.shared_by;
    sees[r] = row >= push.rows ? 0u : (CAUSAL != 0u ? min(end, position + 1u) : end);
    mask_row[r] = push.m_offset + batch * push.m_stride[0] + query_head * push.m_stride[1] +
                  min(position, push.queries - 1u) * push.m_stride[2];
}

// Step 1, for EACH_TEAM keys at once, TEAMS apart; `member` of its team. A query that is read meets all of them.
void score(uint c, uint base, uint end, uint member, uint batch, uint head, uint turn) {
    float product[EACH_TEAM * ROWS];
    float hidden[EACH_TEAM][ROWS];
    bool seen = false;
    bool weighs = false;
    [[unroll]] for (uint i = 0u; i < EACH_TEAM; ++i) {
        biases(base + c + i * TEAMS, hidden[i]);
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
            product[i * ROWS + r] = 0.0;
            seen = seen || !(hidden[i][r] <= FAR);
            weighs = weighs || hidden[i][r] != LOWEST;
        }
    }
    if (SPREAD != 0u) seen = subgroupAny(seen);  // shuffles want every lane
    if (weighs) met[turn] = 1u;
    if (seen) {
        uint at[EACH_TEAM];
        uint start = push.k_offset + batch * push.k_stride[0] + head * push.k_stride[1];
        [[unroll]] for (uint i = 0u; i < EACH_TEAM; ++i) {
            at[i] = start + min(base + c + i * TEAMS, end - 1u) * push.k_stride[2];
        }
        for (uint e = member; e < Q4; e += TEAM) {
            vec4 k[EACH_TEAM];
            [[unroll]] for (uint i = 0u; i < EACH_TEAM; ++i) k[i] = read_key(at[i], e);
            vec4 own = SPREAD != 0u ? query[gl_SubgroupInvocationID * Q4 + e] : vec4(0.0);
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                vec4 q = SPREAD != 0u ? subgroupShuffle(own, r) : query[r * Q4 + e];
                [[unroll]] for (uint i = 0u; i < EACH_TEAM; ++i) product[i * ROWS + r] += dot(k[i], q);
            }
        }
    }
    [[unroll]] for (uint reach = 1u; reach < TEAM; reach *= 2u) {
        [[unroll]] for (uint i = 0u; i < EACH_TEAM * ROWS; ++i) product[i] += subgroupShuffleXor(product[i], reach);
    }
    if (member != 0u) return;
    [[unroll]] for (uint i = 0u; i < EACH_TEAM; ++i) {
        uint own = c + i * TEAMS;
        [[unroll]] for (uint f = 0u; f < FOURS; ++f) {
            vec4 scores;
            [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                float added = hidden[i][f * 4u + e];
                scores[e] = added == LOWEST ? LOWEST : product[i * ROWS + f * 4u + e] + added;
            }
            weight[own * PITCH + f] = scores;
        }
    }
}

// Step 2, for four rows.
void weigh(uint f) {
    vec4 largest = vec4(LOWEST);
    for (uint c = gl_SubgroupInvocationID; c < KEYS; c += gl_SubgroupSize) {
        largest = max(largest, weight[c * PITCH + f]);
    }
    vec4 before = most[f];
    largest = max(before, subgroupMax(largest));
    vec4 origin = mix(largest, vec4(0.0), equal(largest, vec4(LOWEST)));
    vec4 sum = vec4(0.0);
    for (uint c = gl_SubgroupInvocationID; c < KEYS; c += gl_SubgroupSize) {
        vec4 w = exp2(weight[c * PITCH + f] - origin);
        weight[c * PITCH + f] = w;
        sum += w;
    }
    sum = subgroupAdd(sum);
    if (!subgroupElect()) return;
    vec4 less = exp2(before - origin);
    factor[f] = less;
    total[f] = total[f] * less + sum;
    most[f] = largest;
}

// Step 3, for VALUES keys, GROUPS apart, whose values are all on their way before the first is used.
void add_values(uint c, uint base, uint end, uint column, uint batch, uint head) {
    bool weighs[VALUES];
    vec4 v[VALUES * EACH];
    uint start = push.v_offset + batch * push.v_stride[0] + head * push.v_stride[1];
    [[unroll]] for (uint i = 0u; i < VALUES; ++i) {
        uint own = c + i * GROUPS;
        weighs[i] = false;
        if (own >= KEYS || base + own >= end) continue;
        [[unroll]] for (uint f = 0u; f < FOURS; ++f)
            weighs[i] = weighs[i] || any(notEqual(weight[own * PITCH + f], vec4(0.0)));
        if (!weighs[i]) continue;
        [[unroll]] for (uint j = 0u; j < EACH; ++j) {
            uint four = column + j * WIDTH;
            if (V4 % WIDTH == 0u || four < V4) v[i * EACH + j] = read_value(start + (base + own) * push.v_stride[2], four);
        }
    }
    [[unroll]] for (uint i = 0u; i < VALUES; ++i) {
        if (!weighs[i]) continue;
        [[unroll]] for (uint j = 0u; j < EACH; ++j) {
            if (V4 % WIDTH != 0u && column + j * WIDTH >= V4) continue;
            [[unroll]] for (uint r = 0u; r < ROWS; ++r)
                sums[r * EACH + j] += weight[(c + i * GROUPS) * PITCH + r / 4u][r % 4u] * v[i * EACH + j];
        }
    }
}

// Where the sums of a row over the keys of a split are.
uint place_of(uint split, uint row) {
    return (split * gl_NumWorkGroups.y + gl_WorkGroupID.y) * push.rows + row;
}

// Four columns of the result of a row.
void store(uint row, uint four, vec4 value, uint batch, uint head) {
    uint query_head = head * push.shared_by + row % push.shared_by;
    uint at = push.y_offset + batch * push.y_stride[0] + query_head * push.y_stride[1] +
              row / push.shared_by * push.y_stride[2];
    if (ALIGNED != 0u) {
        results[at / 4u + four] = value;
        return;
    }
    for (uint e = 0u; e < 4u; ++e) {
        if (four * 4u + e < push.v_columns) result[at + four * 4u + e] = value[e];
    }
}

// The sums of a row over all groups of lanes, by the first group. A row that sees no key is 0.
void finish_row(uint r, uint row, uint column, uint batch, uint head) {
    float all_weight = total[r / 4u][r % 4u];
    float scale = SPLIT != 0u ? 1.0 : (all_weight == 0.0 ? 0.0 : 1.0 / all_weight);
    [[unroll]] for (uint j = 0u; j < EACH; ++j) {
        uint four = column + j * WIDTH;
        if (V4 % WIDTH != 0u && four >= V4) continue;
        vec4 sum = sums[r * EACH + j];
        for (uint g = 1u; g < GROUPS; ++g) sum += part[(g * EACH + j) * WIDTH + column];
        if (SPLIT != 0u) partial[place_of(gl_WorkGroupID.z, row) * V4 + four] = sum;
        else store(row, four, sum * scale, batch, head);
    }
    if (SPLIT != 0u && column == 0u) totals[place_of(gl_WorkGroupID.z, row)] = vec2(most[r / 4u][r % 4u], all_weight);
}

#ifdef JOINED
// Whether all other workgroups of the key head have ended: what they wrote can be read then.
bool is_last(uint lane) {
    memoryBarrierBuffer();
    barrier();
    if (lane == 0u) {
        memoryBarrierBuffer();
        before = atomicAdd(ended[gl_WorkGroupID.y], 1u);
        memoryBarrierBuffer();
        if (before + 1u == gl_NumWorkGroups.z) ended[gl_WorkGroupID.y] = 0u;
    }
    barrier();
    memoryBarrierBuffer();
    return before + 1u == gl_NumWorkGroups.z;
}

#define TOTAL(split, row) totals[place_of(split, row)]
#define SUM(split, row, four) partial[place_of(split, row) * V4 + (four)]
#include "attention_splits.glsl"

// Four columns of a row from the sums of all splits.
void join(uint row, uint four, uint batch, uint head) {
    store(row, four, of_splits(gl_NumWorkGroups.z, row, four), batch, head);
}
#endif

void main() {
    uint lane = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    uint head = gl_WorkGroupID.y % push.heads;
    uint batch = gl_WorkGroupID.y / push.heads;
    uint first = (gl_NumWorkGroups.x - 1u - gl_WorkGroupID.x) * ROWS;  // the last rows first: they see the most keys
    uint begin = gl_WorkGroupID.z * push.split;
    uint end = min(begin + push.split, push.keys);
    if (CAUSAL != 0u) end = min(end, (min(first + ROWS, push.rows) - 1u) / push.shared_by + 1u);
    uint column = lane % WIDTH;
    uint group = lane / WIDTH;

    // Queries, scaled, to shared memory.
    for (uint i = lane; i < ROWS * Q4; i += LANES) {
        uint row = min(first + i / Q4, push.rows - 1u);
        uint query_head = head * push.shared_by + row % push.shared_by;
        uint at = push.q_offset + batch * push.q_stride[0] + query_head * push.q_stride[1] +
                  row / push.shared_by * push.q_stride[2];
        query[i] = read_query(at, i % Q4) * push.scale;
    }
    for (uint r = lane; r < ROWS; r += LANES) prepare_row(r, first + r, end, batch, head);
    for (uint f = lane; f < FOURS; f += LANES) {
        most[f] = vec4(LOWEST);
        total[f] = vec4(0.0);
    }
    [[unroll]] for (uint i = 0u; i < ROWS * EACH; ++i) sums[i] = vec4(0.0);
    if (lane < 3u) met[lane] = 0u;
    wait();

    for (uint base = begin, turn = 0u; base < end; base += KEYS, turn = (turn + 1u) % 3u) {
        for (uint c = lane / TEAM; c < KEYS; c += EACH_TEAM * TEAMS) {
            score(c, base, end, lane % TEAM, batch, head, turn);
        }
        wait();
        // Of three turns everybody has read the one before, and nobody writes it before the next barrier.
        if (lane == 0u) met[(turn + 2u) % 3u] = 0u;
        if (met[turn] == 0u) continue;
        for (uint f = gl_SubgroupID; f < FOURS; f += gl_NumSubgroups) weigh(f);
        wait();
        [[unroll]] for (uint i = 0u; i < ROWS * EACH; ++i) sums[i] *= factor[i / EACH / 4u][i / EACH % 4u];
        if (group < GROUPS) {
            for (uint c = group; c < KEYS && base + c < end; c += GROUPS * VALUES)
                add_values(c, base, end, column, batch, head);
        }
        wait();
    }

    // Results, row by row.
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        if (GROUPS > 1u) {
            wait();
            if (group < GROUPS) {
                [[unroll]] for (uint j = 0u; j < EACH; ++j) {
                    part[(group * EACH + j) * WIDTH + column] = sums[r * EACH + j];
                }
            }
            wait();
        }
        if (group == 0u && first + r < push.rows) finish_row(r, first + r, column, batch, head);
    }
#ifdef JOINED
    if (!is_last(lane)) return;
    for (uint i = lane; i < push.rows * V4; i += LANES) join(i / V4, i % V4, batch, head);
#endif
}
