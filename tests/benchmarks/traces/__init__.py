"""Published schedules of failures, and what a training made of them. The two recorded ones have their MIT licence beside them.

`bamboo-g4dn.csv` is from github.com/uclasystem/bamboo (`doc/data/aws-spot-instances-g4dn-xlarge-us-east-1c-…2200.csv`).
`parcae-hh.txt` is from github.com/JF-D/Parcae (`aws/traces/vgg19/trace_hh_55_65.txt`).
"""
