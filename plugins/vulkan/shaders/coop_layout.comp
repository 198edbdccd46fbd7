// The layout of a cooperative matrix's elements across the lanes of a subgroup of 32, which VK_KHR_cooperative_matrix
// leaves to the device: row * 16 + column of element e of each lane, of the matrices A, B (transposed) and C of a
// product of float16 as coop_fragments uses them; -1 beyond the last element.
#version 450
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
layout(local_size_x = 32) in;

const uint ELEMENTS = 16u;  // of a lane, at most

layout(set = 0, binding = 0) writeonly buffer Places { int places[]; };  // [3][32][ELEMENTS]

shared float16_t halves[256];
shared float floats[256];

#define FIND(number, TYPE, USE, tile, major)                                             \
    {                                                                                    \
        coopmat<TYPE, gl_ScopeSubgroup, 16, 16, USE> matrix;                             \
        coopMatLoad(matrix, tile, 0, 16, major);                                         \
        for (uint e = 0u; e < ELEMENTS; ++e) {                                           \
            uint at = (number * 32u + gl_SubgroupInvocationID) * ELEMENTS + e;           \
            places[at] = e < matrix.length() ? int(float(matrix[e])) : -1;               \
        }                                                                                \
    }

void main() {
    for (uint i = gl_LocalInvocationIndex; i < 256u; i += 32u) {
        halves[i] = float16_t(float(i));  // up to 2048, whole numbers are exact
        floats[i] = float(i);
    }
    barrier();
    FIND(0u, float16_t, gl_MatrixUseA, halves, gl_CooperativeMatrixLayoutRowMajor)
    FIND(1u, float16_t, gl_MatrixUseB, halves, gl_CooperativeMatrixLayoutColumnMajor)
    FIND(2u, float, gl_MatrixUseAccumulator, floats, gl_CooperativeMatrixLayoutRowMajor)
}
