// Attention of bfloat16 inputs.
#include "attention_items.h"

namespace attention {
RUN(, bf16)
}  // namespace attention
