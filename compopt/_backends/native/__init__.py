"""Operations by the C passes of kernels/native."""
