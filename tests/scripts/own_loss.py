# SPDX-License-Identifier: Apache-2.0
"""A Lightning script as people write it: logits from the model, the loss computed in the step, a dict returned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from output_loss import Model, main


class OwnLoss(Model):
    def training_step(self, batch: dict, batch_idx: int) -> dict:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        accuracy = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100].float().mean()
        self.log_dict({"train_loss": loss, "train_accuracy": accuracy})
        return {"loss": loss, "accuracy": accuracy.detach()}

    def predict_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)


if __name__ == "__main__":
    main(OwnLoss)
