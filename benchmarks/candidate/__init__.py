"""A controller that buys progress a second, on trial: ``controllers.py`` holds it against the present one."""
