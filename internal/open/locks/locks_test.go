package locks_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open/locks"
)

func TestNames(t *testing.T) {
	require.Equal(t, []string{locks.Consul, locks.Etcd, locks.Postgres, locks.Redis, locks.Redlock, locks.ZooKeeper}, locks.Names())
	for _, name := range locks.Names() {
		require.NotEmpty(t, locks.Addrs(name), name)
	}
	require.Len(t, locks.Addrs(locks.Redlock), 5)
}

func TestOpenRefuses(t *testing.T) {
	const secret = "hunter2"
	for _, c := range []struct {
		spec locks.Spec
		want string
	}{
		{locks.Spec{Lock: "memcached"}, `there is no lock "memcached"; there are consul, etcd, postgres, redis, redlock, zookeeper`},
		{locks.Spec{Lock: locks.Redis, Addrs: []string{"a:1", "b:1"}}, "redis is one server, and there are 2 addresses"},
		{locks.Spec{Lock: locks.Redis, Addrs: []string{"redis://:" + secret + "@host:port"}}, "no redis:// URL"},
		{locks.Spec{Lock: locks.Postgres, Addrs: []string{"127.0.0.1:5432"}}, "is no postgres:// URL, as in"},
		{locks.Spec{Lock: locks.Redlock, Addrs: []string{"a:1", " a:1", "b:1"}}, "have an empty one, or one twice"},
		{locks.Spec{Lock: locks.Etcd, Addrs: []string{"a:1", ""}}, "have an empty one, or one twice"},
		{locks.Spec{Lock: locks.Postgres, Addrs: []string{"postgres://u:" + secret + "@host:port/db"}}, "no postgres:// URL"},
	} {
		c.spec.TTL = time.Second
		b, err := locks.Open(t.Context(), c.spec)
		require.ErrorContains(t, err, c.want)
		require.NotContains(t, err.Error(), secret)
		require.Nil(t, b)
	}
}
