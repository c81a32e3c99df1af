// Command gen populates a lock service with many locks, and records their cost.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/internal/bench/populate"
	"github.com/fencelab/fencelab/internal/bench/servercost"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
)

var command = cli.Command{
	Name: "gen",
	About: `
Takes -keys locks, each of another key, with the names, leases and fencing tokens
that the lock itself would use, and leaves them. Keys and owners follow from -seed:
a second run finds its own locks, restarts their leases and adds nothing, and one
that was interrupted is completed. (On etcd it finds them held, and leaves them.) A
lease that has ended meanwhile is granted again, with the next token.

Meanwhile it prints the server's memory, keys, expiry and ping times.

With -experiment it runs the experiment that DIRECTORY/config.json describes, on servers
that it starts and ends itself, and writes DIRECTORY/data.jsonl.`,
	Examples: `
  gen -keys 100000 -ttl 10s                     # into Redis on its usual port
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
	fs.Uint64Var(&g.set.N, "keys", 10_000_000, "how many locks to take; required unless -lock-addr is given")
	fs.Uint64Var(&g.set.Seed, "seed", 1, "seed of the keys and owners")
	fs.DurationVar(&g.set.TTL, "ttl", time.Hour, "how long each lease lasts")
	fs.IntVar(&g.workers, "contenders", 512, "requests under way at a time; to Redis they share pipelines")
	experiment := fs.String("experiment", "", "the `directory` of an experiment to run, instead of all of the above")
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if *experiment != "" {
		if err := servercost.Record(ctx, *experiment, stdout); err != nil {
			return fmt.Errorf("gen: %w", err)
		}
		return nil
	}
	if !given["keys"] && !given["lock-addr"] {
		return fmt.Errorf("gen: it would put %d locks into %s: say how many with -keys, or where with -lock-addr",
			g.set.N, strings.Join(locks.Addrs(*backend), ", "))
	}
	for name, positive := range map[string]bool{"keys": g.set.N > 0, "ttl": g.set.TTL > 0, "contenders": g.workers > 0} {
		if !positive {
			return fmt.Errorf("gen: -%s %s: it must be more than 0 (the default is %s)", name, fs.Lookup(name).Value, fs.Lookup(name).DefValue)
		}
	}
	g.spec = locks.Spec{Lock: *backend, Addrs: locks.Addrs(*backend), TTL: g.set.TTL}
	if *addrs != "" {
		g.spec.Addrs = strings.Split(*addrs, ",")
	}
	if err := g.run(ctx); err != nil {
		return fmt.Errorf("gen: %w", err)
	}
	return nil
}

type generator struct {
	stdout  io.Writer
	spec    locks.Spec
	set     populate.Set
	workers int
}

func (g *generator) run(ctx context.Context) (err error) {
	backend, server, closeAll, err := g.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	if err := cli.Reach(ctx, func(ctx context.Context) error {
		_, err := server.Ask(ctx)
		return err
	}); err != nil {
		return fmt.Errorf("%v (-lock-addr) doesn't answer: %w", g.spec, err)
	}

	var counts populate.Counts
	show := func() error {
		s, err := server.Sample(ctx)
		if err == nil {
			_, err = fmt.Fprintf(g.stdout, "%s of %s  %v\n", populate.Short(float64(counts.Done())), populate.Short(float64(g.set.N)), s)
		}
		return err
	}
	began, done := time.Now(), make(chan struct{})
	all, inner := errgroup.WithContext(ctx)
	all.Go(func() error {
		defer close(done)
		return populate.Each(inner, g.set, g.workers, &counts, populate.Take(backend))
	})
	all.Go(func() error {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return nil
			case <-tick.C:
				if err := show(); err != nil {
					return err
				}
			}
		}
	})
	if err := all.Wait(); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("interrupted: run it again to complete the set: %w", err)
		}
		return fmt.Errorf("after %d locks: %w", counts.Done(), err)
	}
	took, held := time.Since(began), counts.Held.Load()
	if err := show(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(g.stdout, "%d locks taken in %v, %s/s; %d were held\nto remove them: %s\n", counts.Granted.Load(), took.Round(time.Millisecond),
		populate.Short(populate.Rate(counts.Done(), took)), held, g.remove())
	if held > 0 && g.spec.Lock == locks.Redis { // etcd can't tell our own of an earlier run
		return errors.Join(err, fmt.Errorf("%d locks are held by others: wait for their leases to end, or take another -seed", held))
	}
	return err
}

// remove is the shell command that removes all locks of gen, with any seed. It names no password.
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

// open returns a client of the service, which may not have answered yet, and a watch.
func (g *generator) open(ctx context.Context) (b dlock.Backend, server *populate.Server, closeAll func() error, err error) {
	var client io.Closer
	if g.spec.Lock == locks.Etcd {
		c, err := clientv3.New(clientv3.Config{
			Endpoints: g.spec.Addrs, Logger: zap.NewNop(),
			DialKeepAliveTime: cli.ReachTimeout, DialKeepAliveTimeout: cli.ReachTimeout, // else a call waits for a frozen server
		})
		if err != nil {
			return nil, nil, nil, err
		}
		if b, err = etcdlock.New(c, nil); err != nil {
			return nil, nil, nil, errors.Join(err, c.Close())
		}
		client, server = c, populate.WatchEtcd(ctx, c)
	} else {
		if len(g.spec.Addrs) != 1 {
			return nil, nil, nil, fmt.Errorf("redis is one server, and -lock-addr has %d addresses", len(g.spec.Addrs))
		}
		c, err := redisclient.New(g.spec.Addrs[0])
		if err != nil {
			return nil, nil, nil, err
		}
		if b, err = populate.Pipelined(c, nil); err != nil {
			return nil, nil, nil, errors.Join(err, c.Close())
		}
		client, server = c, populate.WatchRedis(ctx, c)
	}
	return b, server, func() error {
		server.Close()
		return errors.Join(b.Close(), client.Close())
	}, nil
}
