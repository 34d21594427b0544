/* 2^x for x in [-0.5, 0.5] by its Taylor series; the rest is below the rounding of a float. Include after `vec`. */
INLINE vec exp2_of_fraction(vec x) {
    vec y = v_set(1.5403530e-4f);
    y = v_fma(y, x, v_set(1.3333558e-3f));
    y = v_fma(y, x, v_set(9.6181291e-3f));
    y = v_fma(y, x, v_set(5.5504109e-2f));
    y = v_fma(y, x, v_set(2.4022651e-1f));
    y = v_fma(y, x, v_set(6.9314718e-1f));
    return v_fma(y, x, v_set(1.0f));
}
