// Elements at places that an index names: of the operand x (gather: the result is dense), or of the result (scatter).
// y holds the indices, int32 and in range; along its dimension the indexed operand has stride 0, and p is its true one.
// Where the table is bound part by part, a lane whose row is in another part does nothing.

#version 450
#extension GL_GOOGLE_include_directive : require

#define OPERANDS 3
#define MOST_DIMS 6u
#define PUSH_MORE uint rows;  // rows of x from row q on
#include "formats.glsl"
#include "strided.glsl"

const uint SCATTER = 1u;

void main() {
    uint at = lane();
    if (at >= push.count) return;
    uint place[OPERANDS];
    find(at, place);
    uint row = y_words[place[2]] - push.q;
    if (row >= push.rows) return;
    place[FUNCTION == SCATTER ? 0 : 1] += row * push.p;
    write(place[0], read_x(place[1]));
}
