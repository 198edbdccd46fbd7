// Many rows of float x, which meet numbers that are made of codes once for all of them; see panel.inl.
#pragma once
#include "core.h"

namespace qcore_cpu {

// The panel that serves rows of this x with a weight.
const Panel& panel_of(const Kernels& kernels, const Weight& w, const Input& in);
// y = x * W^T + bias, for rows of a matrix and for those that are gathered. False if memory ran out.
bool by_panel(const Panel& panel, const Pool& pool, const Weight& w, const Input& in, const Output& out);
bool by_gathered_panels(const Panel& panel, const Pool& pool, const Weight& w, const Input& in, const Output& out);

}  // namespace qcore_cpu
