"""Scalar functions as straight-line vector code: exp, log, powers, trigonometry, erf, gamma, conversions."""
