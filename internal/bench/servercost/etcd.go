package servercost

import (
	"context"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// EtcdConfig is for two runs: locks that share a lease, and a lease per key.
type EtcdConfig struct {
	Keys     uint64        `json:"keys"`      // locks that share a lease
	Leases   uint64        `json:"leases"`    // keys with a lease each
	Workers  int           `json:"workers"`   // concurrent requests
	LeaseTTL load.Duration `json:"lease_ttl"` // of Leases
	// In bytes.
	Quota uint64 `json:"quota"`
}

// startEtcd starts an etcd that syncs to disk, as in production.
func (r *recorder) startEtcd(ctx context.Context, members int, quota uint64, args ...string) (*clientv3.Client, *etcdlock.Backend, error) {
	cluster, err := testbed.StartEtcd(ctx, members, &testbed.Options{
		Args: append(args, "--unsafe-no-fsync=false", "--quota-backend-bytes", fmt.Sprint(quota)),
	})
	if err = r.opened.add(cluster, err); err != nil {
		return nil, nil, err
	}
	r.uses(cluster)
	return r.opened.etcd(clientv3.Config{Endpoints: cluster.Addrs()})
}

func (r *recorder) onEtcd(ctx context.Context, run string, phases func(*clientv3.Client, *etcdlock.Backend) []phase) error {
	r.begin(run)
	client, backend, err := r.startEtcd(ctx, 1, r.config.Etcd.Quota)
	if err != nil {
		return err
	}
	r.watch(WatchEtcd(ctx, client))
	return r.phases(ctx, append(
		append([]phase{empty}, phases(client, backend)...),
		phase{name: "compact", do: func(ctx context.Context, _ *Line) error {
			now, err := client.Get(ctx, "revision", clientv3.WithCountOnly())
			if err == nil {
				_, err = client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
			}
			return err
		}},
		phase{name: "defrag", do: func(ctx context.Context, _ *Line) error {
			_, err := client.Defragment(ctx, client.Endpoints()[0])
			return err
		}},
	)...)
}

func (r *recorder) each(name string, set Set, do func(ctx context.Context, q dlock.Request) error) phase {
	counts := &Counts{}
	return phase{name, func(ctx context.Context, _ *Line) error {
		return Each(ctx, set, r.config.Etcd.Workers, counts, do)
	}, counts}
}

func (r *recorder) etcdShared(ctx context.Context) error {
	return r.onEtcd(ctx, "etcd shared", func(_ *clientv3.Client, backend *etcdlock.Backend) []phase {
		set := Set{Seed: r.config.Seed, N: r.config.Etcd.Keys, TTL: 2 * r.config.Limit.D()}
		return []phase{r.each("fill", set, Take(backend)), r.each("release", set, func(ctx context.Context, q dlock.Request) error {
			return backend.Release(ctx, dlock.Grant{Key: q.Key, Owner: q.Owner, TTL: q.TTL})
		})}
	})
}

// etcdLeases grants a lease per key, as a session per lock would, and lets all expire.
func (r *recorder) etcdLeases(ctx context.Context) error {
	return r.onEtcd(ctx, "etcd leases", func(client *clientv3.Client, _ *etcdlock.Backend) []phase {
		set := Set{Seed: r.config.Seed, N: r.config.Etcd.Leases, TTL: r.config.Etcd.LeaseTTL.D()}
		fill := r.each("fill", set, func(ctx context.Context, q dlock.Request) error {
			lease, err := client.Grant(ctx, int64(q.TTL.Seconds()))
			if err != nil {
				return err
			}
			_, err = client.Put(ctx, q.Key, q.Owner, clientv3.WithLease(lease.ID))
			return err
		})
		return []phase{fill, {name: "expire", do: func(ctx context.Context, end *Line) error {
			s, err := r.server.Ask(ctx)
			if err != nil {
				return err
			}
			before := s.Etcd.LeasesRevoked
			if _, err := r.until(ctx, func(s Sample) bool {
				return s.Etcd.LeasesRevoked > before || s.Etcd.LeasesRevoked == s.Etcd.LeasesGranted
			}); err != nil {
				return err
			}
			first := time.Now()
			if s, err = r.until(ctx, func(s Sample) bool { return s.Etcd.LeasesRevoked == s.Etcd.LeasesGranted }); err != nil {
				return err
			}
			end.Count = s.Etcd.LeasesRevoked - before
			end.Values = map[string]float64{"expiring": time.Since(first).Seconds()} // from the first to the last
			return nil
		}}}
	})
}
