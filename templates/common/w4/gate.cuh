// What a product of gate and up becomes: activation(gate) * up.
#pragma once
#include "common/rows/gelu.cuh"
#include "common/rows/sigmoid.cuh"

enum class Gate { none, gelu_tanh, silu };

// Of a GATE that is not none.
template <Gate GATE> DEVICE float activation(float x) {
    if constexpr (GATE == Gate::silu) return silu_of(x);
    else return gelu_tanh(x);
}
