"""Add NoLoCo to another trainer through a callback: `huggingface` for the transformers library, and `lightning` for
Lightning.

    from noloco_p2p.integrations.huggingface import NoLoCoCallback
    trainer = Trainer(..., callbacks=[NoLoCoCallback(peer)])

Import the module for your trainer. This package itself imports neither torch nor any trainer.
"""
