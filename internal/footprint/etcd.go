package footprint

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/internal/fill"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// EtcdConfig is what is done to etcd, twice: with locks that share one lease, and with a lease for each key.
type EtcdConfig struct {
	Keys    uint64 `json:"keys"`    // locks that share a lease
	Leases  uint64 `json:"leases"`  // keys with a lease of their own
	Workers int    `json:"workers"` // requests at a time
	// LeaseTTL is the TTL of the leases that keys have to themselves.
	LeaseTTL Duration `json:"lease_ttl"`
	// Quota is how large the database may become, in bytes.
	Quota uint64 `json:"quota"`
}

// etcdBed is an etcd of one member in an experiment.
type etcdBed struct {
	*recorder
	client  *clientv3.Client
	sampler *fill.EtcdSampler
}

// onEtcd runs f on an etcd of its own, which syncs to disk as it does in production.
func (r *recorder) onEtcd(ctx context.Context, run string, f func(context.Context, *etcdBed) error) (err error) {
	c := r.config.Etcd
	if c.Keys == 0 || c.Leases == 0 || c.Workers < 1 || c.LeaseTTL.Seconds() < 1 || c.Quota == 0 {
		return errors.New("config.json: etcd: keys, leases, workers and quota must be positive, and lease_ttl 1s at least")
	}
	cluster, err := testbed.StartEtcd(ctx, 1, &testbed.Options{
		Args: []string{"--unsafe-no-fsync=false", "--quota-backend-bytes", fmt.Sprint(c.Quota)},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cluster.Close()) }()
	client, err := clientv3.New(clientv3.Config{Endpoints: cluster.Addrs(), Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	sampler := fill.NewEtcdSampler(ctx, client, cluster.Addrs()[0])
	defer sampler.Close()
	b := &etcdBed{r, client, sampler}
	if err := r.begin(run, cluster.String()); err != nil {
		return err
	}
	err = b.do(ctx, "empty", func(context.Context) (uint64, map[string]float64, error) { return 0, nil, nil })
	if err != nil {
		return err
	}
	return f(ctx, b)
}

func (b *etcdBed) do(ctx context.Context, name string, do func(context.Context) (uint64, map[string]float64, error)) error {
	return b.phase(ctx, name, b.watch, nil, do)
}

func (b *etcdBed) watch(ctx context.Context) (*fill.RedisSample, *fill.EtcdSample, error) {
	s, err := b.sampler.Sample(ctx)
	return nil, &s, err
}

// clean compacts the history and then defragments the database.
func (b *etcdBed) clean(ctx context.Context) error {
	err := b.do(ctx, "compact", func(ctx context.Context) (uint64, map[string]float64, error) {
		now, err := b.client.Get(ctx, "revision", clientv3.WithCountOnly())
		if err != nil {
			return 0, nil, err
		}
		_, err = b.client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
		return 0, nil, err
	})
	if err != nil {
		return err
	}
	return b.do(ctx, "defrag", func(ctx context.Context) (uint64, map[string]float64, error) {
		_, err := b.client.Defragment(ctx, b.client.Endpoints()[0])
		return 0, nil, err
	})
}

// etcdShared takes locks with etcdlock, whose locks of one process share a lease, releases them, and cleans up.
func (r *recorder) etcdShared(ctx context.Context) error {
	return r.onEtcd(ctx, "etcd shared", func(ctx context.Context, b *etcdBed) (err error) {
		backend, err := etcdlock.New(b.client, nil)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, backend.Close()) }() //nolint:contextcheck // it cleans up when ctx has ended, too
		c := r.config.Etcd
		set := fill.Set{Seed: r.config.Seed, N: c.Keys, TTL: 2 * r.config.Limit.Duration}
		var taken, freed fill.Counts
		err = b.phase(ctx, "fill", b.watch, taken.Done, func(ctx context.Context) (uint64, map[string]float64, error) {
			err := fill.Locks(ctx, backend, set, c.Workers, &taken)
			return taken.Granted(), nil, err
		})
		if err != nil {
			return err
		}
		err = b.phase(ctx, "release", b.watch, freed.Done, func(ctx context.Context) (uint64, map[string]float64, error) {
			err := fill.Each(ctx, set, c.Workers, &freed, func(ctx context.Context, q dlock.Request) error {
				return backend.Release(ctx, dlock.Grant{Key: q.Key, Owner: q.Owner, TTL: q.TTL})
			})
			return freed.Done(), nil, err
		})
		if err != nil {
			return err
		}
		return b.clean(ctx)
	})
}

// etcdLeases grants a lease for each key, as processes with a session for each lock do, and lets them all expire.
func (r *recorder) etcdLeases(ctx context.Context) error {
	return r.onEtcd(ctx, "etcd leases", func(ctx context.Context, b *etcdBed) error {
		c := r.config.Etcd
		set := fill.Set{Seed: r.config.Seed, N: c.Leases, TTL: c.LeaseTTL.Duration}
		var made fill.Counts
		err := b.phase(ctx, "fill", b.watch, made.Done, func(ctx context.Context) (uint64, map[string]float64, error) {
			err := fill.Each(ctx, set, c.Workers, &made, func(ctx context.Context, q dlock.Request) error {
				lease, err := b.client.Grant(ctx, int64(q.TTL.Seconds()))
				if err != nil {
					return err
				}
				_, err = b.client.Put(ctx, q.Key, q.Owner, clientv3.WithLease(lease.ID))
				return err
			})
			return made.Done(), nil, err
		})
		if err != nil {
			return err
		}
		err = b.do(ctx, "expire", func(ctx context.Context) (uint64, map[string]float64, error) {
			s, err := b.sampler.Ask(ctx)
			if err != nil {
				return 0, nil, err
			}
			before, wait := s.LeasesRevoked, time.Now()
			var first time.Time // since when leases have been expiring
			err = until(ctx, func(ctx context.Context) (bool, error) {
				s, err = b.sampler.Ask(ctx)
				if first.IsZero() && s.LeasesRevoked > before {
					first = time.Now()
				}
				return s.LeasesRevoked == s.LeasesGranted, err
			})
			return s.LeasesRevoked - before, map[string]float64{
				"before": float64(before), "waited": first.Sub(wait).Seconds(), "expiring": time.Since(first).Seconds(),
			}, err
		})
		if err != nil {
			return err
		}
		return b.clean(ctx)
	})
}
