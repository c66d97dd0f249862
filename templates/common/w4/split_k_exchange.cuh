// Split-K exchange: fp32 partial sums that blocks of one launch exchange by LL (ll_exchange.cuh), four at a time.
#pragma once
#include "common/pipeline/ll_exchange.cuh"

DEVICE uint4 ll_encode_sums(float4 v) {
    return make_uint4(ll_encode_float(v.x), ll_encode_float(v.y), ll_encode_float(v.z), ll_encode_float(v.w));
}
DEVICE float4 as_sums(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
