"""From logits to tokens: sampling parameters, logits processors, sampling noise, grammars."""
