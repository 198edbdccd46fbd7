// Rows of x that are sorted by expert, each with its own weight (EXPERTS = 1). The weights lie one below the other, each
// padded to eight rows. A tile of rows belongs to one expert: tiles are counted from the first expert's on, and what the
// ends say is kept within the rows, whatever they are. Needs EXPERTS, and the push constants `expert_first`,
// `expert_count` (of this part of the weight), `expert_total` and `expert_row`, the row that row 0 of x is by the ends.

struct RowTile {
    uint expert;  // the total: the rows after the last end, which belong to no expert and whose results are 0
    uint first, end;
};

uint end_of(uint expert, uint start, uint rows) {
    return uint(clamp(ends[expert] - int(PUSH(expert_row)), int(start), int(rows)));
}

// Tile number `tile` of `height` rows of the `rows` of x; an empty one if there are fewer.
RowTile row_tile(uint tile, uint height, uint rows) {
    if (EXPERTS == 0u) return RowTile(0u, min(tile * height, rows), min((tile + 1u) * height, rows));
    uint expert = PUSH(expert_first);
    uint last = expert + PUSH(expert_count);
    uint start = expert == 0u ? 0u : end_of(expert - 1u, 0u, rows);
    for (; expert < last; ++expert) {
        uint end = end_of(expert, start, rows);
        uint tiles = (end - start + height - 1u) / height;
        if (tile < tiles) break;
        tile -= tiles;
        start = end;
    }
    uint end = expert < last ? end_of(expert, start, rows) : last == PUSH(expert_total) ? rows : start;
    uint first = min(start + tile * height, end);
    return RowTile(expert, first, min(first + height, end));
}

// The first row of an expert's weight in this part of the weights; `n`: rows of each.
uint weight_start(uint expert, uint n) {
    return EXPERTS == 0u ? 0u : (expert - PUSH(expert_first)) * ((n + 7u) & ~7u);
}

// Where the biases of an expert begin: after the ends.
uint bias_start(uint expert, uint n) {
    return EXPERTS == 0u ? 0u : PUSH(expert_total) + expert * n;
}
