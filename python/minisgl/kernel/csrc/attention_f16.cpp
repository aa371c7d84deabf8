// Attention of float16 inputs.
#include "attention_items.h"

namespace attention {
RUN(, f16)
}  // namespace attention
