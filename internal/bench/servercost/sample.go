package servercost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Pings are about 100 a second, fewer if they took longer, of the server's cheapest request, on a connection of their own.
type Pings struct {
	PingMax time.Duration `json:"ping_max_ns"` // since the sample before
}

// RedisSample is from a Redis's INFO.
type RedisSample struct {
	UsedMemory    uint64  `json:"used_memory"`             // bytes allocated
	UsedMemoryRSS uint64  `json:"used_memory_rss"`         // bytes in RAM
	Fragmentation float64 `json:"mem_fragmentation_ratio"` // UsedMemoryRSS / UsedMemory
	Keys          uint64  `json:"keys"`                    // with expired ones that are not yet deleted
	Expires       uint64  `json:"expires"`                 // those with a TTL
	ExpiredKeys   uint64  `json:"expired_keys"`            // deleted by expiry since the start
	Pings
}

// EtcdSample is from an etcd member's /metrics. A ping is a linearizable read.
type EtcdSample struct {
	Revision      uint64 `json:"revision"` // grows by one with each write
	Keys          uint64 `json:"keys"`
	DBSize        uint64 `json:"db_size"`        // bytes of the database's file
	DBSizeInUse   uint64 `json:"db_size_in_use"` // bytes of it in use, with history
	RSS           uint64 `json:"rss"`            // bytes in RAM
	LeasesGranted uint64 `json:"leases_granted"` // since the start
	LeasesRevoked uint64 `json:"leases_revoked"` // since the start, with expired ones
	Pings
}

// Sample is a server's state at one moment.
type Sample struct {
	Redis *RedisSample `json:"redis,omitempty"`
	Etcd  *EtcdSample  `json:"etcd,omitempty"`
}

// String formats s as a line of progress.
func (s Sample) String() string {
	ping := s.pings().PingMax.Round(time.Microsecond)
	if r := s.Redis; r != nil {
		return fmt.Sprintf("used %sB, RSS %sB (%.2f)  %s keys, %s with a TTL  expired %s  ping %v at most",
			Short(r.UsedMemory), Short(r.UsedMemoryRSS), r.Fragmentation, Short(r.Keys), Short(r.Expires), Short(r.ExpiredKeys), ping)
	}
	e := s.Etcd
	return fmt.Sprintf("revision %s  %s keys, %s leases  db %sB, %sB in use, RSS %sB  read %v at most", Short(e.Revision), Short(e.Keys),
		Short(e.LeasesGranted-e.LeasesRevoked), Short(e.DBSize), Short(e.DBSizeInUse), Short(e.RSS), ping)
}

func (s Sample) pings() *Pings {
	if s.Redis != nil {
		return &s.Redis.Pings
	}
	return &s.Etcd.Pings
}

// Server is pinged about 100 times a second, and sampled on request. It doesn't close the client.
type Server struct {
	Ask    func(ctx context.Context) (Sample, error) // returns a sample without pings
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	slowest time.Duration
	err     error
}

func watch(ctx context.Context, ask func(ctx context.Context) (Sample, error), ping func(context.Context) error) *Server {
	s := &Server{Ask: ask, done: make(chan struct{})}
	ctx, s.cancel = context.WithCancel(ctx)
	go func() {
		defer close(s.done)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			began := time.Now()
			err := ping(ctx)
			took := time.Since(began)
			if ctx.Err() != nil {
				return
			}
			s.mu.Lock()
			s.slowest = max(s.slowest, took)
			if err != nil {
				s.err = fmt.Errorf("ping: %w", err)
			}
			s.mu.Unlock()
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	}()
	return s
}

// Close ends the pings.
func (s *Server) Close() error {
	s.cancel()
	<-s.done
	return nil
}

// Sample returns a sample with the pings since the last one, and the error of a failed ping.
func (s *Server) Sample(ctx context.Context) (Sample, error) {
	out, err := s.Ask(ctx)
	if err != nil {
		return out, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out.pings().PingMax, s.slowest = s.slowest, 0
	return out, s.err
}

// WatchRedis watches the client's server.
func WatchRedis(ctx context.Context, client *redis.Client) *Server {
	return watch(ctx, func(ctx context.Context) (Sample, error) {
		info, err := client.InfoMap(ctx).Result()
		if err != nil {
			return Sample{}, err
		}
		s, err := parseInfo(info)
		return Sample{Redis: &s}, err
	}, func(ctx context.Context) error { return client.Ping(ctx).Err() })
}

// A missing field is an error, since 0 is a valid value.
func parseInfo(info map[string]map[string]string) (s RedisSample, err error) {
	number := func(section, name string) float64 {
		v, perr := strconv.ParseFloat(info[section][name], 64)
		if perr != nil {
			err = errors.Join(err, fmt.Errorf("INFO says %s:%s, which is not a number", name, info[section][name]))
		}
		return v
	}
	s.UsedMemory, s.UsedMemoryRSS = uint64(number("Memory", "used_memory")), uint64(number("Memory", "used_memory_rss"))
	s.Fragmentation = number("Memory", "mem_fragmentation_ratio")
	s.ExpiredKeys = uint64(number("Stats", "expired_keys"))
	for name, db := range info["Keyspace"] {
		var keys, expires uint64
		if _, serr := fmt.Sscanf(db, "keys=%d,expires=%d", &keys, &expires); serr != nil {
			err = errors.Join(err, fmt.Errorf("INFO says %s:%s: %w", name, db, serr))
		}
		s.Keys, s.Expires = s.Keys+keys, s.Expires+expires
	}
	return s, err
}

// WatchEtcd watches the client's first member.
func WatchEtcd(ctx context.Context, client *clientv3.Client) *Server {
	url := client.Endpoints()[0]
	if !strings.Contains(url, "://") {
		url = "http://" + url
	}
	url = strings.TrimSuffix(url, "/") + "/metrics"
	web := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return watch(ctx, func(ctx context.Context) (Sample, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return Sample{}, err
		}
		resp, err := web.Do(req)
		if err != nil {
			return Sample{}, err
		}
		defer func() { _ = resp.Body.Close() }()
		s, err := parseMetrics(resp.Body)
		return Sample{Etcd: &s}, err
	}, func(ctx context.Context) error {
		_, err := client.Get(ctx, "ping", clientv3.WithCountOnly())
		return err
	})
}

// A missing metric is an error, since 0 is a valid value.
func parseMetrics(r io.Reader) (s EtcdSample, err error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(r)
	if err != nil {
		return s, fmt.Errorf("/metrics of etcd: %w", err)
	}
	for name, to := range map[string]*uint64{
		"etcd_debugging_mvcc_current_revision": &s.Revision, "etcd_debugging_mvcc_keys_total": &s.Keys,
		"etcd_mvcc_db_total_size_in_bytes": &s.DBSize, "etcd_mvcc_db_total_size_in_use_in_bytes": &s.DBSizeInUse,
		"process_resident_memory_bytes":      &s.RSS,
		"etcd_debugging_lease_granted_total": &s.LeasesGranted, "etcd_debugging_lease_revoked_total": &s.LeasesRevoked,
	} {
		metrics := all[name].GetMetric()
		if len(metrics) == 0 {
			err = errors.Join(err, fmt.Errorf("/metrics of etcd has no %s", name))
			continue
		}
		*to = uint64(metrics[0].GetGauge().GetValue() + metrics[0].GetCounter().GetValue())
	}
	return s, err
}
