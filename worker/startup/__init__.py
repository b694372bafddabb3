"""From settings to a worker that is ready: load and measure the model, choose a transport, register.

Entry: ``main.Worker.warm_up`` calls each module. Settings enter; a device, a transport and a registration leave, which
the ``Worker`` owns.
"""
