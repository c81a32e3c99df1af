// Command gen fills a lock service with many locks, and records what they cost it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/fill"
	"github.com/fencelab/fencelab/internal/footprint"
	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/server"
)

var command = cli.Command{
	Name: "gen",
	About: `
Takes -keys locks, each of another key, with the names, leases and fencing tokens
that the lock itself would use, and leaves them. Keys and owners follow from -seed:
a second run finds its own locks, restarts their leases and adds nothing, and one
that was interrupted is completed. (On etcd it finds them held, and leaves them.) A
lease that has ended meanwhile is granted anew, with the next token.

While it works it tells how the server takes it: memory, keys and expiry, and how
long a ping takes meanwhile.

With -experiment it plays the experiment that DIRECTORY/config.json describes, on servers
that it starts and ends itself, and writes DIRECTORY/data.jsonl.`,
	Examples: `
  gen -keys 100000 -ttl 10s -o samples.jsonl    # into Redis on its usual port
  gen -lock-addr localhost:6379                 # ten million
  gen -backend etcd -keys 200000
  FENCELAB_TESTBED=local gen -experiment reports/results/ten-million-keys`,
}

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	g := generator{stdout: stdout}
	var fs flag.FlagSet
	backend := cli.Choice(&fs, "backend", "the lock service", locks.Redis, locks.Etcd)
	addrs := fs.String("lock-addr", "", "`addresses` of the lock service, with commas between them: host:port, or URLs (redis://);\n"+
		"empty: the usual ones on this host, as in deploy/compose.yaml")
	fs.Uint64Var(&g.set.N, "keys", 10_000_000, "how many locks to take; to be given unless -lock-addr is")
	fs.Uint64Var(&g.set.Seed, "seed", 1, "what keys and owners follow from")
	fs.DurationVar(&g.set.TTL, "ttl", time.Hour, "how long each lease lasts")
	fs.IntVar(&g.pipeline.Conns, "conns", 4, "connections to Redis")
	fs.IntVar(&g.pipeline.Batch, "batch", 256, "requests that a connection to Redis sends at a time")
	fs.IntVar(&g.workers, "contenders", 256, "requests to etcd at a time")
	fs.DurationVar(&g.every, "every", time.Second, "time between samples of the server")
	fs.StringVar(&g.out, "o", "", "a `file` for the samples, as JSON lines; none by default")
	fs.StringVar(&g.metrics, "metrics", "", "`host:port` for /metrics and /healthz; port 0 takes a free one, which is printed; empty: none")
	experiment := fs.String("experiment", "", "the `directory` of an experiment to play, instead of all of the above")
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if *experiment != "" {
		if err := footprint.Record(ctx, *experiment, stdout); err != nil {
			return fmt.Errorf("gen: %w", err)
		}
		return nil
	}
	if !given["keys"] && !given["lock-addr"] {
		return fmt.Errorf("gen: it would put %d locks into %s: say how many with -keys, or where with -lock-addr",
			g.set.N, strings.Join(locks.Addrs(*backend), ", "))
	}
	for _, f := range []struct {
		name     string
		positive bool
	}{
		{"keys", g.set.N > 0},
		{"ttl", g.set.TTL > 0},
		{"conns", g.pipeline.Conns > 0},
		{"batch", g.pipeline.Batch > 0},
		{"contenders", g.workers > 0},
		{"every", g.every > 0},
	} {
		if !f.positive {
			return fmt.Errorf("gen: -%s %s: it must be more than 0 (the default is %s)", f.name, fs.Lookup(f.name).Value, fs.Lookup(f.name).DefValue)
		}
	}
	g.spec = locks.Spec{Lock: *backend, Addrs: locks.Addrs(*backend), TTL: g.set.TTL}
	if *addrs != "" {
		g.spec.Addrs = strings.Split(*addrs, ",")
	}
	return g.run(ctx)
}

// generator is what the flags say.
type generator struct {
	stdout   io.Writer
	spec     locks.Spec
	set      fill.Set
	pipeline fill.Pipeline
	workers  int
	every    time.Duration

	out, metrics string
}

// target is a lock service that can be filled and watched.
type target struct {
	fill   func(ctx context.Context, c *fill.Counts) error
	ping   func(ctx context.Context) error
	watch  func(ctx context.Context) // begins to ping on and on
	sample func(ctx context.Context) (fmt.Stringer, error)
	close  func() error
}

// reachTimeout is how long the lock service may take to answer for the first time.
const reachTimeout = 5 * time.Second

func (g *generator) run(ctx context.Context) (err error) {
	t, err := g.open(ctx)
	if err != nil {
		return fmt.Errorf("gen: %w", err)
	}
	defer func() { err = errors.Join(err, t.close()) }()
	reach, cancel := context.WithTimeoutCause(ctx, reachTimeout, fmt.Errorf("no answer within %v", reachTimeout))
	defer cancel()
	if err := t.ping(reach); err != nil {
		if reach.Err() != nil {
			err = context.Cause(reach)
		}
		return fmt.Errorf("gen: %s at %s (-lock-addr) doesn't answer: %w", g.spec.Lock, strings.Join(g.spec.Addrs, ", "), err)
	}
	t.watch(ctx)

	var counts fill.Counts
	gauges, stop, err := g.serve(ctx, t, &counts)
	if err != nil {
		return fmt.Errorf("gen: %w", err)
	}
	defer func() { err = errors.Join(err, stop()) }()

	var samples *json.Encoder
	if g.out != "" {
		f, cerr := os.Create(g.out)
		if cerr != nil {
			return fmt.Errorf("gen: -o: %w", cerr)
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		samples = json.NewEncoder(f)
	}

	began := time.Now()
	bar := fill.NewBar(g.stdout, g.set.N)
	show := func(ctx context.Context) error {
		s, err := t.sample(ctx)
		if err != nil {
			return err
		}
		fields, err := fieldsOf(s)
		if err != nil {
			return err
		}
		fields["done"], fields["seconds"] = float64(counts.Done()), time.Since(began).Seconds()
		for name, v := range fields {
			gauges.WithLabelValues(name).Set(v)
		}
		if samples != nil {
			if err := samples.Encode(fields); err != nil {
				return err
			}
		}
		return bar.Show(counts.Done(), s.String())
	}
	err = g.fill(ctx, t, &counts, show)
	if err := errors.Join(err, bar.End()); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("interrupted: run it again to complete the set: %w", err)
		}
		return fmt.Errorf("gen: after %d locks: %w", counts.Done(), err)
	}
	took := time.Since(began)
	_, err = fmt.Fprintf(g.stdout, "%d locks taken in %v, %s/s; %d were held\nto remove them: %s\n", counts.Granted(), took.Round(time.Millisecond),
		fill.Short(fill.Rate(counts.Done(), took)), counts.Held(), g.remove())
	if held := counts.Held(); held > 0 && g.spec.Lock == locks.Redis { // etcd can't tell our own of an earlier run
		return errors.Join(err, fmt.Errorf("gen: %d locks are held by others: wait for their leases to end, or take another -seed", held))
	}
	return err
}

// remove is the shell command that removes what this and earlier runs have left, with any seed. It names no password.
func (g *generator) remove() string {
	if g.spec.Lock == locks.Etcd {
		return fmt.Sprintf("etcdctl --endpoints=%s del --prefix lock/gen/", strings.Join(g.spec.Addrs, ","))
	}
	at := g.spec.Addrs[0]
	if u, err := url.Parse(at); err == nil && u.Host != "" {
		at = u.Scheme + "://" + u.Host + u.Path
	} else {
		at = "redis://" + at
	}
	return fmt.Sprintf("redis-cli -u %s --scan --pattern '*:{gen/*' | xargs -r -n 1000 redis-cli -u %[1]s unlink", at)
}

// fill fills t, and shows how that goes until it is done, and once after that.
func (g *generator) fill(ctx context.Context, t *target, counts *fill.Counts, show func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	filled := make(chan error, 1)
	go func() { filled <- t.fill(ctx, counts) }()
	tick := time.NewTicker(g.every)
	defer tick.Stop()
	for {
		select {
		case err := <-filled:
			if err != nil {
				return err
			}
			return show(ctx)
		case <-tick.C:
			if err := show(ctx); err != nil {
				cancel()
				if ferr := <-filled; ferr != nil && !errors.Is(ferr, context.Canceled) {
					err = errors.Join(ferr, err)
				}
				return err
			}
		}
	}
}

// fieldsOf are a sample's fields by their names in JSON.
func fieldsOf(sample any) (map[string]float64, error) {
	b, err := json.Marshal(sample)
	if err != nil {
		return nil, err
	}
	fields := map[string]float64{}
	return fields, json.Unmarshal(b, &fields)
}

// serve serves /metrics, if it is to be served: how far the fill is, and the last sample.
func (g *generator) serve(ctx context.Context, t *target, c *fill.Counts) (*prometheus.GaugeVec, func() error, error) {
	gauges := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "gen_sample", Help: "What the server said last, by the name of the field, as in the lines of -o.",
	}, []string{"field"})
	if g.metrics == "" {
		return gauges, func() error { return nil }, nil
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(gauges,
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "gen_locks_granted_total", Help: "Locks of the set that their owners hold."},
			func() float64 { return float64(c.Granted()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "gen_locks_held_total", Help: "Locks that another owner holds."},
			func() float64 { return float64(c.Held()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "gen_locks_wanted", Help: "Locks in the set."},
			func() float64 { return float64(g.set.N) }))
	ln, err := cli.ListenFor(ctx, "metrics", g.metrics)
	if err != nil {
		return nil, nil, err
	}
	if _, err := fmt.Fprintf(g.stdout, "metrics on http://%s/metrics\n", ln.Addr()); err != nil {
		return nil, nil, errors.Join(err, ln.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- server.ServeMetrics(ctx, ln, reg, t.ping, cli.NewLogger(os.Stderr, slog.LevelWarn)) }()
	return gauges, func() error { cancel(); return <-served }, nil
}

// open connects to the lock service. It may return before that has answered.
func (g *generator) open(ctx context.Context) (*target, error) {
	if g.spec.Lock == locks.Etcd {
		return g.openEtcd(ctx)
	}
	if len(g.spec.Addrs) != 1 {
		return nil, fmt.Errorf("redis is one server, and -lock-addr has %d addresses", len(g.spec.Addrs))
	}
	client, err := redisclient.New(g.spec.Addrs[0])
	if err != nil {
		return nil, err
	}
	if most := client.Options().PoolSize; g.pipeline.Conns > most {
		return nil, errors.Join(client.Close(), fmt.Errorf("-conns %d: the client has %d at most; take fewer, or give it more in -lock-addr redis://HOST:PORT?pool_size=%d",
			g.pipeline.Conns, most, g.pipeline.Conns))
	}
	var sampler *fill.RedisSampler
	return &target{
		fill: func(ctx context.Context, c *fill.Counts) error {
			return fill.Redis(ctx, client, nil, g.set, g.pipeline, c)
		},
		ping:   func(ctx context.Context) error { return client.Ping(ctx).Err() },
		watch:  func(ctx context.Context) { sampler = fill.NewRedisSampler(ctx, client) },
		sample: func(ctx context.Context) (fmt.Stringer, error) { return sampler.Sample(ctx) },
		close: func() error {
			if sampler != nil {
				sampler.Close()
			}
			return client.Close()
		},
	}, nil
}

func (g *generator) openEtcd(ctx context.Context) (*target, error) {
	backend, err := locks.Open(ctx, g.spec)
	if err != nil {
		return nil, err
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: g.spec.Addrs, Logger: zap.NewNop()})
	if err != nil {
		return nil, errors.Join(err, backend.Close())
	}
	var sampler *fill.EtcdSampler
	return &target{
		fill:   func(ctx context.Context, c *fill.Counts) error { return fill.Locks(ctx, backend, g.set, g.workers, c) },
		ping:   backend.Ping,
		watch:  func(ctx context.Context) { sampler = fill.NewEtcdSampler(ctx, client, g.spec.Addrs[0]) },
		sample: func(ctx context.Context) (fmt.Stringer, error) { return sampler.Sample(ctx) },
		close: func() error {
			if sampler != nil {
				sampler.Close()
			}
			return errors.Join(client.Close(), backend.Close())
		},
	}, nil
}
