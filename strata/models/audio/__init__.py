"""Speech: sound files, log-mel features, Whisper's transcription, CTC models over waveforms."""
