// Sums and maxima over a workgroup: by subgroup, then over the subgroups' results in shared memory. Every invocation of
// the workgroup must call them, and gets the result.

#extension GL_KHR_shader_subgroup_arithmetic : require

shared float team_part[256];  // of each subgroup: a workgroup has at most 1024 lanes, a subgroup at least 4

float team_sum(float value) {
    value = subgroupAdd(value);
    if (gl_NumSubgroups == 1u) return value;
    barrier();  // everybody has read what the call before this one left
    if (subgroupElect()) team_part[gl_SubgroupID] = value;
    barrier();
    float sum = 0.0;
    for (uint s = 0u; s < gl_NumSubgroups; ++s) sum += team_part[s];
    return sum;
}

float team_max(float value) {
    value = subgroupMax(value);
    if (gl_NumSubgroups == 1u) return value;
    barrier();
    if (subgroupElect()) team_part[gl_SubgroupID] = value;
    barrier();
    float most = team_part[0];
    for (uint s = 1u; s < gl_NumSubgroups; ++s) most = max(most, team_part[s]);
    return most;
}
