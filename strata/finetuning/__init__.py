"""Fine-tune decoders with LoRA, also over quantised weights (QLoRA): training steps, memory plans, PEFT adapters."""

from strata.arguments import public_names
from strata.finetuning.lora import LoraOptions, finetune, save_adapter
from strata.finetuning.step import TrainingStep

public_names(globals())
