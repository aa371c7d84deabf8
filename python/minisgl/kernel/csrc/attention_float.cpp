// Attention of float32 inputs.
#include "attention_items.h"

namespace attention {
RUN(, float)
}  // namespace attention
