package stores

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/resource/s3store"
)

func awsConfig(ctx context.Context, u *url.URL, o Options) (config aws.Config, closeIdle func() error, err error) {
	client, transport := httpClient(o.Fresh)
	if config, err = onaws.Config(ctx, u, client); err != nil {
		return config, nil, fmt.Errorf("stores: %w", err)
	}
	// A write is sent once: the SDK would retry when a hazard breaks the connection.
	config.Retryer = func() aws.Retryer { return aws.NopRetryer{} }
	return config, func() error { transport.CloseIdleConnections(); return nil }, nil
}

func openS3(ctx context.Context, u *url.URL, o Options) (*Store, error) {
	config, closeIdle, err := awsConfig(ctx, u, o)
	if err != nil {
		return nil, err
	}
	b := onaws.OpenBucket(u, config)
	open := s3store.Open
	if o.Prepared {
		open = func(_ context.Context, c *s3.Client, bucket string, opts *s3store.Options) (*s3store.Store, error) {
			return s3store.New(c, bucket, opts)
		}
	} else if err := b.Create(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("stores: %w", err), closeIdle())
	}
	s, err := open(ctx, b.Client, b.Name, &s3store.Options{Prefix: b.Prefix})
	return opened(S3, s, err, closeIdle)
}

func openDynamoDB(ctx context.Context, u *url.URL, o Options) (*Store, error) {
	config, closeIdle, err := awsConfig(ctx, u, o)
	if err != nil {
		return nil, err
	}
	client := dynamodb.NewFromConfig(config)
	if !o.Prepared {
		if err := dynamostore.CreateTable(ctx, client, u.Host); err != nil {
			return nil, errors.Join(err, closeIdle())
		}
	}
	d, err := dynamostore.New(client, u.Host)
	s, err := opened(DynamoDB, d, err, closeIdle)
	if err != nil {
		return nil, err
	}
	s.Diverges = func(ctx context.Context) (bool, error) {
		out, err := client.DescribeTable(ctx, &dynamodb.DescribeTableInput{TableName: &u.Host})
		return err == nil && out.Table != nil && len(out.Table.Replicas) > 0 && out.Table.MultiRegionConsistency != types.MultiRegionConsistencyStrong, err
	}
	return s, nil
}
