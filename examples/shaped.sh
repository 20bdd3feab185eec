# Two ranks of a script on one machine, with a slow link between them (root): the measured rate is within 5 % of the limit.
#
#     sudo env PATH="$PATH" bash examples/shaped.sh 100mbit train.py
#
# It cleans up when it ends or fails; after a kill -9: ip netns del r0; ip netns del r1; ip link del br0
rate=${1:?a rate, as tc writes it: 100mbit} script=${2:?a script to run}
clean() { for i in 0 1; do ip netns del r$i; ip link del v$i; done; ip link del br0; } 2>/dev/null
trap clean EXIT
ip link add br0 type bridge && ip link set br0 up
for i in 0 1; do
    ip netns add r$i
    ip link add v$i type veth peer name e$i netns r$i
    ip link set v$i master br0 up
    ip -n r$i addr add 10.77.0.$((i + 1))/24 dev e$i
    ip -n r$i link set e$i up
    ip -n r$i link set lo up
    ip netns exec r$i tc qdisc add dev e$i root tbf rate $rate burst 256kb latency 50ms
    tc qdisc add dev v$i root tbf rate $rate burst 256kb latency 50ms
done
for i in 0 1; do
    GLOO_SOCKET_IFNAME=e$i OMP_NUM_THREADS=1 ip netns exec r$i torchrun --nnodes 2 --node-rank $i --nproc-per-node 1 \
        --master-addr 10.77.0.1 --master-port 29500 "$script" &
    pids="$pids $!"
done
wait $pids
ip -n r0 -s link show e0  # the bytes that crossed
