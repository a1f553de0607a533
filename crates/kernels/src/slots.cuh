// Slots of a pool, one for each row.
#pragma once
#include "cuda/common.cuh"

// The slot of rows that have none, as in slots.rs.
constexpr uint32_t NO_SLOT = 0xffffffffu;
