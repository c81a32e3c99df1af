package servercost

import (
	"context"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/bench/populate"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// EtcdConfig is for two runs: locks that share a lease, and a lease for each key.
type EtcdConfig struct {
	Keys     uint64        `json:"keys"`      // locks that share a lease
	Leases   uint64        `json:"leases"`    // keys with a lease of their own
	Workers  int           `json:"workers"`   // requests at a time
	LeaseTTL load.Duration `json:"lease_ttl"` // of Leases
	// In bytes.
	Quota uint64 `json:"quota"`
}

// startEtcd starts an etcd that syncs to disk, as in production.
func (r *recorder) startEtcd(ctx context.Context, members int, quota uint64, args ...string) (*clientv3.Client, *etcdlock.Backend, error) {
	cluster, err := testbed.StartEtcd(ctx, members, &testbed.Options{
		Args: append(args, "--unsafe-no-fsync=false", "--quota-backend-bytes", fmt.Sprint(quota)),
	})
	if err != nil {
		return nil, nil, err
	}
	r.closeLater(cluster.Close)
	r.uses(cluster)
	client, err := clientv3.New(clientv3.Config{Endpoints: cluster.Addrs(), Logger: zap.NewNop()})
	if err != nil {
		return nil, nil, err
	}
	r.closeLater(client.Close)
	backend, err := etcdlock.New(client, nil)
	if err != nil {
		return nil, nil, err
	}
	r.closeLater(backend.Close)
	return client, backend, nil
}

// onEtcd runs phases on one member, then compacts and defragments it.
func (r *recorder) onEtcd(ctx context.Context, run string, phases func(*clientv3.Client, *etcdlock.Backend, *populate.Server) []phase) error {
	r.begin(run)
	client, backend, err := r.startEtcd(ctx, 1, r.config.Etcd.Quota)
	if err != nil {
		return err
	}
	server := populate.WatchEtcd(ctx, client)
	r.closeLater(func() error { server.Close(); return nil })
	r.began = time.Now()
	all := append([]phase{{name: "empty", do: nothing}}, phases(client, backend, server)...)
	return r.phases(ctx, server, append(
		all,
		phase{name: "compact", do: func(ctx context.Context) (uint64, map[string]float64, error) {
			now, err := client.Get(ctx, "revision", clientv3.WithCountOnly())
			if err != nil {
				return 0, nil, err
			}
			_, err = client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
			return 0, nil, err
		}},
		phase{name: "defrag", do: func(ctx context.Context) (uint64, map[string]float64, error) {
			_, err := client.Defragment(ctx, client.Endpoints()[0])
			return 0, nil, err
		}},
	)...)
}

func (r *recorder) each(name string, set populate.Set, do func(ctx context.Context, q dlock.Request) error) phase {
	var counts populate.Counts
	return phase{name, func(ctx context.Context) (uint64, map[string]float64, error) {
		err := populate.Each(ctx, set, r.config.Etcd.Workers, &counts, do)
		return counts.Granted.Load(), nil, err
	}, counts.Done}
}

// etcdShared takes and releases locks; those of one process share a lease.
func (r *recorder) etcdShared(ctx context.Context) error {
	return r.onEtcd(ctx, "etcd shared", func(_ *clientv3.Client, backend *etcdlock.Backend, _ *populate.Server) []phase {
		set := populate.Set{Seed: r.config.Seed, N: r.config.Etcd.Keys, TTL: 2 * r.config.Limit.D()}
		return []phase{r.each("fill", set, populate.Take(backend)), r.each("release", set, func(ctx context.Context, q dlock.Request) error {
			return backend.Release(ctx, dlock.Grant{Key: q.Key, Owner: q.Owner, TTL: q.TTL})
		})}
	})
}

// etcdLeases grants a lease for each key, like a session for each lock, and lets all expire.
func (r *recorder) etcdLeases(ctx context.Context) error {
	return r.onEtcd(ctx, "etcd leases", func(client *clientv3.Client, _ *etcdlock.Backend, server *populate.Server) []phase {
		set := populate.Set{Seed: r.config.Seed, N: r.config.Etcd.Leases, TTL: r.config.Etcd.LeaseTTL.D()}
		fill := r.each("fill", set, func(ctx context.Context, q dlock.Request) error {
			lease, err := client.Grant(ctx, int64(q.TTL.Seconds()))
			if err != nil {
				return err
			}
			_, err = client.Put(ctx, q.Key, q.Owner, clientv3.WithLease(lease.ID))
			return err
		})
		return []phase{fill, {name: "expire", do: func(ctx context.Context) (uint64, map[string]float64, error) {
			s, err := server.Ask(ctx)
			if err != nil {
				return 0, nil, err
			}
			before, wait := s.Etcd.LeasesRevoked, time.Now()
			var first time.Time // lease expired
			err = until(ctx, func() (bool, error) {
				if s, err = server.Ask(ctx); err != nil {
					return false, err
				}
				if first.IsZero() && s.Etcd.LeasesRevoked > before {
					first = time.Now()
				}
				return s.Etcd.LeasesRevoked == s.Etcd.LeasesGranted, nil
			})
			if err != nil {
				return 0, nil, err
			}
			return s.Etcd.LeasesRevoked - before, map[string]float64{
				"before": float64(before), "waited": first.Sub(wait).Seconds(), "expiring": time.Since(first).Seconds(),
			}, nil
		}}}
	})
}
