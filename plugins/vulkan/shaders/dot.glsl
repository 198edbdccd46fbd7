// dot(a, b): the sum of products of four signed bytes each, as int32. With DOT as OpSDot, which old compilers know
// through spirv_intrinsics only; else by taking the bytes apart.

#ifdef DOT
#extension GL_EXT_spirv_intrinsics : require
// 4450 OpSDot; 6019 DotProduct, 6018 DotProductInput4x8BitPacked; format 0: PackedVectorFormat4x8Bit.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
int packed_dot(int a, int b, spirv_literal int format);

int dot_bytes(uint a, uint b) {
    return packed_dot(int(a), int(b), 0);
}
#else
int dot_bytes(uint a, uint b) {
    int p = int(a);
    int q = int(b);
    return bitfieldExtract(p, 0, 8) * bitfieldExtract(q, 0, 8) + bitfieldExtract(p, 8, 8) * bitfieldExtract(q, 8, 8) +
           bitfieldExtract(p, 16, 8) * bitfieldExtract(q, 16, 8) + (p >> 24) * (q >> 24);
}
#endif
