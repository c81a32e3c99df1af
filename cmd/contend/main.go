// Command contend offers load to a lock and measures waits, throughput and fairness.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/bench"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/server"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var command = cli.Command{
	Name: "contend",
	About: `
Puts load on a lock and measures it: how long acquisitions wait, how many critical
sections there are per second, who gets the lock, and in which order.

In the open model arrivals come at -rate, whatever the lock does, and a wait counts
from the moment at which the arrival was due. With -closed the contenders acquire,
work and release over and over: a hot key's ceiling.

The lock is one of this module's or of another library: redsync, redsync-5 (on five
nodes), redislock (bsm's), rueidislock, etcd-mutex (concurrency.Mutex) and zk-lock
(go-zookeeper's). Those that poll do so every 10 ms, redsync-100ms and redislock-100ms
every 100 ms. Its servers are those at -lock, or started with -testbed.

Two aren't locks; they show the best that a lock on Redis could do. "ping" sends a PING
for each acquisition and each release: the floor that network, scheduler and this
program put under every wait. "baton" is the only element of a list, taken with BLPOP
and given back with RPUSH: a FIFO queue without owner, lease or token, and so the most
that a queue of go-redis clients can be expected to do on a hot key.

With -experiment it runs the list of runs in DIR/config.json, on servers that it
starts, and writes a line for each to DIR/data.jsonl once all are done; until then they
are in data.jsonl.partial, which stays if the experiment ends early.
`,
	Examples: `
  contend -testbed auto -closed -contenders 200                # a hot key on a Redis of its own
  contend -backend etcd -lock etcd://127.0.0.1:2379 -rate 100  # a hot key in an open model
  contend -rate 5000 -keys 10000000 -o run.json                # uncontended
  contend -rate 5000 -keys 10000000 -backend ping              # and its floor
  contend -closed -testbed auto -delay 250us                   # over a network
  contend -closed -testbed auto -processors 1                  # the server has the other processors to itself
  contend -experiment reports/results/contention`,
}

// The load competes with the lock's server for cores; at GOGC=100 its garbage collector runs four times as often.
const gcPercent = 400

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout io.Writer) (err error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	var fs flag.FlagSet
	c := load.Config{}
	duration := func(p *load.Duration, name string, value time.Duration, usage string) {
		fs.DurationVar((*time.Duration)(p), name, value, usage)
	}
	backend := cli.Choice(&fs, "backend", "the lock", bench.Names()...)
	lock := fs.String("lock", "", "`URL` of the lock service, redlock:// for redsync on several servers:\n"+locks.URLs+";\n"+
		"empty: at its usual address on this host, as in deploy/compose.yaml")
	provider := cli.Choice(&fs, "testbed", "where to get servers for this run alone;\n"+
		"external: from the environment, FENCELAB_REDIS_ADDR and so on; the flag -lock wins, its variable doesn't",
		"none", string(testbed.Auto), string(testbed.Containers), string(testbed.Local), string(testbed.External), string(testbed.Embedded))
	fs.IntVar(&c.Contenders, "contenders", 200, "how many acquisitions can be under way at a time")
	fs.IntVar(&c.Connections, "connections", 0, "how many clients the contenders share; 0: each has one of its own")
	fs.IntVar(&c.Processors, "processors", 0, "how many processors the load uses at a time; 0: all; it then competes\nwith a server on the same host")
	fs.Uint64Var(&c.Keys, "keys", 1, "how many keys there are; 1 is a hot key")
	closed := fs.Bool("closed", false, "the closed model, instead of arrivals at -rate")
	fs.Float64Var(&c.Rate, "rate", 1000, "arrivals per second, of a Poisson process")
	duration(&c.Work, "work", 0, "how long a holder keeps the lock")
	duration(&c.TTL, "ttl", dlock.DefaultTTL, "how long a lease lasts")
	duration(&c.Delay, "delay", 0, "added latency of each message between client and server, in each direction:\n"+
		"half the round trip of the network that it simulates")
	duration(&c.Warmup, "warmup", 2*time.Second, "load before the measurement")
	duration(&c.Duration, "duration", 10*time.Second, "how long to measure")
	fs.Uint64Var(&c.Seed, "seed", 1, "decides the keys and the arrivals")
	fs.StringVar(&c.Prefix, "prefix", "contend/", "begins the name of every key; runs with the same prefix contend with each other")
	output := fs.String("o", "", "the `file` for the result as JSON; -: standard output, in one line")
	metrics := fs.String("metrics", "", "`host:port` for /metrics and /healthz; port 0 picks a free one, which is printed; empty: none")
	experiment := fs.String("experiment", "", "the `directory` of an experiment: its config.json says what to run;\n"+
		"other flags are ignored, except -testbed")
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	if *output != "" && *output != "-" {
		if err := cli.Replaceable(*output); err != nil {
			return fmt.Errorf("contend: -o: %w", err)
		}
	}
	if *experiment != "" {
		from := testbed.Provider("")
		if *provider != "none" {
			from = testbed.Provider(*provider)
		}
		return bench.Run(ctx, *experiment, from, os.Stderr)
	}

	c.Backend = *backend
	switch {
	case *closed:
		c.Rate = 0
	case c.Rate <= 0:
		return fmt.Errorf("contend: -rate %v; it must be positive, or ask for the closed model with -closed", c.Rate)
	}
	if c.Connections == 0 {
		c.Connections = c.Contenders
	}
	if err := bench.Check(c); err != nil {
		return fmt.Errorf("contend: %w", err)
	}
	j := bench.Job{Config: c}
	if *provider != "none" && *lock == os.Getenv("FENCELAB_LOCK") {
		*lock = "" // the variable is for cron jobs, whose servers this load must not hit by accident
	}
	if *lock != "" {
		spec, err := locks.Parse(*lock)
		if service := bench.Service(*backend); err == nil && spec.Lock != service && (spec.Lock != locks.Redlock || *backend != "redsync") {
			err = fmt.Errorf("it is a URL of %s, and -backend %s needs %s", spec.Lock, *backend, service)
		}
		if err != nil {
			return fmt.Errorf("contend: -lock: %w", err)
		}
		j.Addrs = spec.Addrs
	}
	reg := prometheus.NewRegistry()
	if *metrics != "" {
		ln, lerr := cli.Listen(ctx, "metrics", *metrics)
		if lerr != nil {
			return fmt.Errorf("contend: %w", lerr)
		}
		fmt.Fprintf(os.Stderr, "metrics on http://%s/metrics\n", ln.Addr())
		stop := server.StartMetrics(ctx, ln, reg, func(context.Context) error { return nil }, nil)
		defer func() { err = errors.Join(err, stop()) }()
	}
	if *provider != "none" && *lock == "" {
		s, serr := bench.Start(ctx, bench.Service(*backend), bench.ServerSpec{}, testbed.Options{Provider: testbed.Provider(*provider), Progress: os.Stderr})
		if serr != nil {
			return serr
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		j.Addrs, j.Server = s.Addrs, s.Text
	}
	if err := reach(ctx, j); err != nil {
		return err
	}
	res, err := j.Run(ctx, reg, bench.Progress(os.Stderr))
	if res == nil {
		return err
	}
	return errors.Join(report(*output, stdout, res), err)
}

// report prints a result and saves it as -o says. A broken or idle lock is an error.
func report(output string, stdout io.Writer, res *load.Result) (err error) {
	if output == "-" {
		err = json.NewEncoder(stdout).Encode(res)
	} else {
		_, err = io.WriteString(stdout, bench.Summary(res))
	}
	if err != nil {
		return err
	}
	if output != "" && output != "-" {
		b, err := json.MarshalIndent(res, "", "  ")
		if err == nil {
			err = cli.ReplaceFile(output, append(b, '\n'))
		}
		if err != nil {
			return fmt.Errorf("contend: -o: %w", err)
		}
	}
	return cmp.Or(bench.Broken(res), bench.Idle(res))
}

func reach(ctx context.Context, j bench.Job) error {
	service := bench.Service(j.Config.Backend)
	addrs := j.Addrs
	if len(addrs) == 0 {
		addrs = locks.Addrs(service)
	}
	if service == locks.Redis && len(addrs) > 1 { // redsync
		service = locks.Redlock
	}
	spec := locks.Spec{Lock: service, Addrs: addrs, TTL: j.Config.TTL.D()}
	b, err := locks.Reach(ctx, spec)
	if err == nil {
		err = b.Close()
	}
	if err != nil {
		return fmt.Errorf("contend: %v doesn't answer: %w (-lock says where it is; "+
			"docker compose -f deploy/compose.yaml --profile all up starts one, and so does -testbed auto, for this run)", spec, err)
	}
	return nil
}
