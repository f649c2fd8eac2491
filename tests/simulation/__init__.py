"""The real coordinator in a simulated world, under one scheduler that plays the same schedule again.

docs/testing.md explains what is simulated. The modules, from the bottom:

* `scheduler`: processes, of which one runs at a time, and the events that stop, kill or overtake them
* `machine`: the clock, the randomness and the threads of a simulated process
* `memory`: what a storage, a target or Spark remembers, with each state that it ever had
* `world`: the memories of one run, and what really happened in it; `requests`: to the requests of operators
* `storage`, `spark`, `targets`: the systems that the library talks to
* `operators`: the commands of a person, who follows the runbook
* `scenario`: a schedule as data, and how one is drawn from a seed
* `judge`: what is right, without the library's own rules
* `simulation`: plays a scenario, and returns what is wrong
* `families`: schedules of one kind with each moment once; `shrink`: the smallest schedule that still fails
"""
