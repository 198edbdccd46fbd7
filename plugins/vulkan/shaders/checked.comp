// Indices made safe: those beyond 0 ... size - 1 become the nearest in range, and a flag says that there was one.
// Negative indices count from the end if `wrap` is set.

#version 450

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

layout(push_constant) uniform Push {
    uint count;
    int size;
    uint wrap;
    uint offset;  // of the first index
} push;

layout(binding = 0) readonly buffer Indices { int indices[]; };
layout(binding = 1) buffer Bad { uint bad[]; };
layout(binding = 7) writeonly buffer Result { int result[]; };

void main() {
    uint at = (gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x) * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (at >= push.count) return;
    int index = indices[push.offset + at];
    if (push.wrap != 0u && index < 0) index += push.size;
    int safe = clamp(index, 0, push.size - 1);
    if (safe != index) atomicOr(bad[0], 1u);
    result[at] = safe;
}
