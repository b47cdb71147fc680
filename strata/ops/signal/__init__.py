"""FFT, STFT, windows and mel features."""
