"""Loss scaling by ``torch.amp.GradScaler``, in Horovod's own sequence."""


def step_as_horovod(optimizer, scaler, clip=lambda: None):
    """After a backward pass: exchange, unscale, ``clip``, step, choose the next scale."""
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    clip()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
