"""What the kernel gives: thin functions under the system calls' own names, and small tools over them.

Standard library only. Nothing here knows what a sandbox is, where state lives, or what a user may do.
"""
